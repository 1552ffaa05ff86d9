"""TRL's half of `benchmarks.vs_trl`: TRL's GRPOTrainer on the job in a JSON file. Runs in
`.venv-trl`.

`.venv-trl/bin/python -m benchmarks.trl_side JOB.json` reads the fields of `Job` from the file. The
only code of this project it uses is the grader, which needs only math-verify.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.reward.answers.equivalence import verdict
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer


@dataclass(frozen=True)
class Job:
    """One run of TRL's trainer; checkpoints, `log.json` and this job go to `output`."""

    model: str
    output: str
    seed: int
    save_every: int
    settings: dict[str, Any]
    """Arguments of GRPOConfig."""
    learning_rates: list[float]
    """Learning rate of every step."""
    prompts: list[dict[str, Any]]
    """Prompts in the order of the steps, each with `text`, `ids` and `answer`."""
    completions: list[list[int]] | None = None
    """Completions (token ids) to train on instead of sampling, `num_generations` per prompt, in
    order."""

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self) -> Path:
        path = Path(self.output) / "job.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


def grade(answer: str, text: str, stopped: bool) -> bool:
    """Returns the reward-server's verdict with `require_stop`, but without its time limits."""
    extracted = extract_answer(text)
    gold = gold_answer(answer)
    assert gold is not None
    if extracted is None or not stopped:
        return False
    same = same_answer(gold, extracted)
    return verdict(gold, extracted) == "right" if same is None else same


def main() -> None:
    os.environ.setdefault(
        "TRL_EXPERIMENTAL_SILENCE", "1"
    )  # silences the warning about rollout_func
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job = Job.read(Path(sys.argv[1]))
    completions = (
        job.settings["per_device_train_batch_size"] * job.settings["gradient_accumulation_steps"]
    )

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer with a given learning rate for every step; TRL's own schedule starts at zero,
        a step later.
        """

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            rates = [rate / self.args.learning_rate for rate in job.learning_rates]
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda i: rates[min(i, len(rates) - 1)]
            )
            self.lr_scheduler = schedule
            return schedule

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            generation.append(time.perf_counter() - began)
            return found

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Measures the wall time of every step, without checkpoints."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self._began)

    def reward(
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        answer: Sequence[str],
        **_: Any,
    ) -> list[float]:
        stops = set(trainer.eos_token_ids)
        answers = zip(answer, completions, completion_ids, strict=True)
        return [float(grade(right, text, ids[-1] in stops)) for right, text, ids in answers]

    def replayed(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        assert job.completions is not None
        start = trainer.state.global_step * len(prompts)
        ids = trainer.processing_class(text=list(prompts))["input_ids"]
        return {
            "prompt_ids": ids,
            "completion_ids": job.completions[start : start + len(prompts)],
            "logprobs": None,
        }

    clock = Clock()
    generation: list[float] = []
    trainer = Trainer(
        model=job.model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=job.output,
            seed=job.seed,
            max_steps=len(job.prompts) * job.settings["num_generations"] // completions,
            save_strategy="steps",
            save_steps=job.save_every,
            save_only_model=True,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
            **job.settings,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt["text"], "answer": prompt["answer"]} for prompt in job.prompts]
        ),
        callbacks=[clock],
        rollout_func=replayed if job.completions is not None else None,
    )
    for prompt in job.prompts:
        ids = trainer.processing_class(text=[prompt["text"]])["input_ids"][0]
        if ids != prompt["ids"]:
            raise SystemExit(
                f"TRL's tokenisation of {prompt['text']!r} differs: {ids}, not {prompt['ids']}"
            )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    log = {"steps": steps, "seconds": clock.seconds, "generation": generation}
    (Path(job.output) / "log.json").write_text(json.dumps(log), encoding="utf-8")


if __name__ == "__main__":
    main()
