"""Does this trainer learn like TRL's GRPOTrainer? Both get the same model, prompts, settings,
grader and evaluator.

There are two measurements on the built-in task with the demo's settings. *Free*: each half samples
its own completions over several seeds; the held-out greedy accuracy of the checkpoints and the
rewards of the training batches are compared
pairwise per seed. *Replay*: TRL trains on exactly the tokens that this trainer trained on, so the
loss, gradient norm and weights of every step can be compared deterministically.

TRL runs in `.venv-trl`, which `make bench-trl` creates. Runs alternate, one at a time. For a
controlled experiment,
give one half other settings: `--ours '--algorithm.aggregation sequence_mean_token_mean'` or `--trl
'{"top_k": 50}'`. With `--reuse`, the unchanged half comes from an earlier run.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.command import command_parser, setting_words
from benchmarks.processes import TRL_PYTHON, require_trl, run
from benchmarks.trl_side import Job, grade
from benchmarks.vs_trl_report import Half, Point, Replay, print_free, print_replays
from common.errors import ConfigError
from common.process.cli import fail
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.schemas import Group, Prompt
from services.data.loaders import load_split
from services.data.stream import PromptStream
from services.replay.buffer import unpack_groups
from services.replay.store import Store
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import learning_rate
from trainer.policy.scorer import load_tokenizer, quiet, stop_token_ids

_TRL_EPS = "1e-4"
"""The constant TRL adds to a group's standard deviation; TRL has no setting for it, so this trainer
adopts it."""


def settings(directory: Path, seed: int, *, steps: int, every: int, extra: str = "") -> Config:
    """Returns the settings of this trainer's half."""
    own = {
        "config": "jobgroup/configs/tiny-cpu.yaml",
        "seed": seed,
        "algorithm.advantage_eps": _TRL_EPS,
        "trainer.run_dir": directory,
        "state_dir": directory / "state",
        "trainer.max_steps": steps,
        "trainer.eval_every": every,
        "trainer.eval_pass_samples": 0,
        "trainer.checkpoint_every": every,
        "trainer.keep_checkpoints": 1000,
    }
    return load(setting_words(own) + shlex.split(extra), {})


def trl_settings(config: Config) -> dict[str, Any]:
    """Returns the same settings under TRL's names, but only those that matter or differ from TRL's
    defaults.
    """
    trainer = config.trainer
    sampling = config.sampling
    algorithm = config.algorithm
    return {
        "per_device_train_batch_size": trainer.batch_size * sampling.group_size,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "num_generations": sampling.group_size,
        "max_completion_length": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "shuffle_dataset": False,
        "learning_rate": trainer.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": trainer.warmup_steps,
        "adam_beta1": trainer.adam_betas[0],
        "adam_beta2": trainer.adam_betas[1],
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "beta": algorithm.kl_coef,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def job(
    config: Config, output: Path, overrides: dict[str, Any], groups: list[Group] | None = None
) -> Job:
    """Returns TRL's half: the first prompts of the data-server's stream and, with `groups`, their
    completions.
    """
    trainer = config.trainer
    tokenizer = load_tokenizer(config.model)
    assert trainer.max_steps is not None
    with tempfile.TemporaryDirectory() as state:
        stream = PromptStream(
            load_split(config.data, "train", config.seed), config.seed, Path(state)
        )
        prompts = stream.take(trainer.max_steps * trainer.batch_size).prompts
        stream.close()
    rates = [learning_rate(step, None, trainer) for step in range(trainer.max_steps)]
    given_prompts = []
    for prompt in prompts:
        ids = _prompt_ids(prompt, config, tokenizer)
        text = _text(ids, tokenizer)
        given_prompts.append({"ids": ids, "text": text, "answer": prompt.ground_truth})
    completions = None
    if groups is not None:
        completions = [each.token_ids.tolist() for group in groups for each in group.completions]
    return Job(
        model=config.model.name,
        output=str(output),
        seed=config.seed,
        save_every=trainer.checkpoint_every,
        settings={**trl_settings(config), **overrides},
        learning_rates=[] if "warmup_steps" in overrides else rates,
        prompts=given_prompts,
        completions=completions,
    )


def _prompt_ids(prompt: Prompt, config: Config, tokenizer: Any) -> list[int]:
    return Prompter(tokenizer, PromptStyle.of(config), []).token_ids(prompt)


def _text(ids: list[int], tokenizer: Any) -> str:
    """Returns the text that tokenizes to these tokens, without a first token that the tokenizer
    adds itself.
    """
    text = str(tokenizer.decode(ids))
    if tokenizer(text)["input_ids"] == ids:
        return text
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def recorded(config: Config) -> list[Group]:
    """Reads every group that a finished run trained on from its replay buffer, in prompt order."""
    store = Store(config.state_dir / "replay" / "replay.db")
    listed = sorted(store.listing(1_000_000, 0), key=lambda row: int(row["position"]))
    groups = unpack_groups([store.blob(row["id"]) for row in listed])
    store.close()
    return groups


def padded(tokenizer: Any, prompts: list[list[int]]) -> Any:
    """Pads prompts of token ids into the input of transformers' `generate`."""
    return tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")


def greedy_accuracy(directory: Path, config: Config) -> float:
    """Evaluates a checkpoint of either half: transformers' greedy decoding on the held-out
    problems.
    """
    tokenizer = load_tokenizer(config.model)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    stops = stop_token_ids(model, tokenizer)
    problems = load_split(config.data, "eval", config.seed)[: config.trainer.eval_samples]
    inputs = padded(tokenizer, [_prompt_ids(problem, config, tokenizer) for problem in problems])
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=config.sampling.max_new_tokens,
            eos_token_id=stops,
        )
    answers = output[:, inputs["input_ids"].shape[1] :].tolist()
    right = 0
    for problem, tokens in zip(problems, answers, strict=True):
        stopped = any(stop in tokens for stop in stops)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        right += grade(problem.ground_truth, text, stopped)
    return right / len(problems)


class Runs:
    """Runs each half in a separate process under `root`, or takes it from `options.reuse`, and
    reads the results.
    """

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options = options
        self.root = root
        self.steps = sorted(
            {*range(options.every, options.steps + 1, options.every), options.steps}
        )

    def config(self, seed: int, extra: str = "", root: Path | None = None) -> Config:
        """Returns the settings of this trainer's half; TRL's half gets the same without `extra`."""
        place = (root or self.root) / f"ours-{seed}"
        every = self.options.every
        return settings(place, seed, steps=self.options.steps, every=every, extra=extra)

    def run(self, half: str, seed: int) -> None:
        if self._place(half, seed).parent != self.root:
            return
        if half == "trl":
            self._trl(self._job(seed, self.root))
        else:
            words = ["--one", str(seed), "--out", str(self.root), f"--ours={self.options.ours}"]
            words += ["--steps", str(self.options.steps), "--every", str(self.options.every)]
            command = [sys.executable, "-m", "benchmarks.vs_trl_learning", *words]
            run(self.root / f"ours-{seed}.txt", *command, OMP_NUM_THREADS="1")

    def replay(self, seed: int) -> Replay:
        """Trains TRL on the tokens of this trainer's finished run on `seed`."""
        ours = self._place("ours", seed)
        output = self.root / f"replay-{seed}"
        config = self.config(seed, root=ours.parent)
        groups = recorded(config)
        task = job(config, output, json.loads(self.options.trl), groups)
        assert [prompt["ids"] for prompt in task.prompts] == [
            group.prompt_token_ids.tolist() for group in groups
        ]
        self._trl(task)
        base = Path(config.model.name)
        points = []
        for step in self.steps:
            own = _checkpoint(ours, step)
            other = _checkpoint(output, step)
            point = Point(
                step=step,
                ours=greedy_accuracy(own, config),
                trl=greedy_accuracy(other, config),
                apart=_distance(own, other) / _distance(own, base),
            )
            points.append(point)
        return Replay(read_lines(ours / "metrics.jsonl"), _log(output)["steps"], points)

    def read(self, half: str, seed: int) -> Half:
        config = self.config(seed)
        place = self._place(half, seed)
        accuracy = [greedy_accuracy(_checkpoint(place, step), config) for step in self.steps]
        if half == "trl":
            return Half.of_trl(accuracy, _log(place))
        lines = {line["step"]: line["accuracy"] for line in read_lines(place / "evaluations.jsonl")}
        return Half.of_ours(
            accuracy, read_lines(place / "metrics.jsonl"), [lines[step] for step in self.steps]
        )

    def _job(self, seed: int, root: Path) -> Job:
        return job(self.config(seed), root / f"trl-{seed}", json.loads(self.options.trl))

    def _trl(self, task: Job) -> None:
        command = (TRL_PYTHON, "-m", "benchmarks.trl_side", task.write())
        run(Path(f"{task.output}.txt"), *command, OMP_NUM_THREADS="1")

    def _place(self, half: str, seed: int) -> Path:
        """Returns the directory of a half: an earlier one if it finished with exactly these
        settings.
        """
        earlier = self.options.reuse and self.options.reuse / f"{half}-{seed}"
        if earlier and half == "trl" and (earlier / "log.json").exists():
            same = Job.read(earlier / "job.json") == self._job(seed, earlier.parent)
        elif earlier and half == "ours" and _checkpoint(earlier, self.options.steps).exists():
            before = json.loads((earlier / "config.json").read_text(encoding="utf-8"))
            same = before == self.config(seed, self.options.ours, earlier.parent).model_dump(
                mode="json"
            )
        else:
            same = False
        return earlier if same else self.root / f"{half}-{seed}"


def _checkpoint(place: Path, step: int) -> Path:
    own = place / "checkpoints" / f"step_{step:06d}"
    return own if own.parent.exists() else place / f"checkpoint-{step}"


def _log(place: Path) -> Any:
    return json.loads((place / "log.json").read_text(encoding="utf-8"))


def _distance(one: Path, other: Path) -> float:
    """Returns the Euclidean distance between the weights of two checkpoints."""
    left, right = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (one, other)
    )
    return float(torch.cat([(left[name] - right[name]).flatten() for name in left]).norm())


def main() -> None:
    parser = command_parser("vs_trl_learning", __doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="pairs of runs; at least 2 for a standard error (default 5)",
    )
    parser.add_argument(
        "--first-seed", type=int, default=0, help="first of the consecutive seeds (default 0)"
    )
    parser.add_argument("--steps", type=int, default=40, help="updates of every run (default 40)")
    parser.add_argument(
        "--every", type=int, default=10, help="steps between compared checkpoints (default 10)"
    )
    parser.add_argument(
        "--replays",
        type=int,
        default=1,
        help="seeds on which TRL also trains on our tokens (default 1)",
    )
    parser.add_argument(
        "--ours",
        default="",
        metavar="WORDS",
        help="extra settings of this trainer, for an experiment",
    )
    parser.add_argument(
        "--trl",
        default="{}",
        metavar="JSON",
        help="extra GRPOConfig fields; `warmup_steps`: TRL's own schedule",
    )
    parser.add_argument(
        "--out", type=Path, help="an empty directory that keeps runs, logs and checkpoints"
    )
    parser.add_argument(
        "--reuse", type=Path, metavar="DIR", help="reuse equal runs of this earlier --out"
    )
    parser.add_argument("--one", type=int, metavar="SEED", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.one is not None:
            train_in_process(
                Runs(options, options.out).config(options.one, options.ours), Console(quiet=True)
            )
        else:
            compare(options)
    except ConfigError as error:
        fail(error)


def compare(options: argparse.Namespace) -> None:
    """Runs everything and prints the tables."""
    require_trl()
    if options.out and options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(
            "the directory is not empty",
            field="--out",
            value=str(options.out),
            remedy="name a new one",
        )
    quiet()
    torch.set_num_threads(1)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.out or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        runs = Runs(options, root)
        for seed in track(seeds, description="training"):
            for half in ("ours", "trl") if seed % 2 == 0 else ("trl", "ours"):
                runs.run(half, seed)
        replayed = track(seeds[: options.replays], description="replaying")
        replays = {seed: runs.replay(seed) for seed in replayed}
        ours, trl = (
            [runs.read(half, seed) for seed in track(seeds, description="evaluating")]
            for half in ("ours", "trl")
        )
    print_free(runs.steps, ours, trl)
    if replays:
        print_replays(replays)


if __name__ == "__main__":
    main()
