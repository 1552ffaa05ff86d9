"""The same faults in a script of TRL: what does its trainer say? Runs in `.venv-trl`.

`.venv-trl/bin/python -m checks.faults.trl_side NAME SEED DIRECTORY MODEL` is started by
`python -m checks.faults --trl`. Of this project it uses only the problems of the built-in task.
"""

import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from services.data.tiny import problems

_GROUPS = 4
_GROUP_SIZE = 8
_STRUCK = "struck"
Scores = Sequence[Any]
Reward = Callable[..., Scores]


def right(text: str, truth: str) -> float:
    """Returns 1 if the last number of the text is the ground truth."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == int(truth))


class Side:
    """One run of TRL's trainer, whose reward function is disturbed after some calls."""

    def __init__(self, name: str, seed: int, directory: Path, model: str) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.strike_step = self.rng.randint(1, 3)
        self.seed = seed
        self.directory = directory
        self.model = model
        self.rows = [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "ground_truth": str(problem.answer),
            }
            for problem in islice(problems("train", seed), 256)
        ]

    def strike(self) -> None:
        """Notes when the fault strikes."""
        path = self.directory / _STRUCK
        if not path.exists():
            path.write_text(str(time.monotonic()))

    def correctness(self, disturbed: Callable[[list[float]], Scores]) -> Reward:
        """Returns a reward function whose scores are `disturbed` after `strike_step` calls."""
        calls = 0

        def correctness(completions: list[Any], ground_truth: list[str], **columns: Any) -> Scores:
            nonlocal calls
            calls += 1
            texts = [completion[0]["content"] for completion in completions]
            scores = [right(text, truth) for text, truth in zip(texts, ground_truth, strict=True)]
            if calls <= self.strike_step:
                return scores
            self.strike()
            return disturbed(scores)

        return correctness

    def train(self, *rewards: Reward, resume: bool = False, **arguments: Any) -> None:
        """Trains a few steps."""
        import torch
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

        torch.set_num_threads(1)
        settings: dict[str, Any] = {
            "output_dir": str(self.directory / "run"),
            "per_device_train_batch_size": _GROUPS * _GROUP_SIZE,
            "num_generations": _GROUP_SIZE,
            "max_steps": 12,
            "max_completion_length": 24,
            "learning_rate": 5e-4,
            "save_steps": 2,
            "use_cpu": True,
            "report_to": "none",
            "seed": self.seed,
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=list(rewards),
            args=GRPOConfig(**(settings | arguments)),
            train_dataset=Dataset.from_list(self.rows),
        )
        trainer.train(resume_from_checkpoint=resume)


def _replaced(side: Side, value: Any) -> Callable[[list[float]], Scores]:
    def replace(scores: list[float]) -> Scores:
        changed: list[Any] = list(scores)
        changed[side.rng.randrange(len(changed))] = value
        return changed

    return replace


def _reward_none(side: Side) -> None:
    side.train(side.correctness(_replaced(side, None)))


def _reward_nan(side: Side) -> None:
    side.train(side.correctness(_replaced(side, float("nan"))))


def _reward_infinite(side: Side) -> None:
    side.train(side.correctness(_replaced(side, float("inf"))))


def _reward_raises(side: Side) -> None:
    side.train(side.correctness(lambda scores: [score / 0 for score in scores]))


def _reward_too_few(side: Side) -> None:
    side.train(side.correctness(lambda scores: scores[:-1]))


def _reward_hangs(side: Side) -> None:
    def hang(scores: list[float]) -> Scores:
        time.sleep(3600)
        return scores

    side.train(side.correctness(hang))


def _reward_constant(side: Side) -> None:
    def present(completions: list[Any], **columns: Any) -> Scores:
        side.strike()
        return [0.5 for _ in completions]

    side.train(present)


def _reward_function_dead(side: Side) -> None:
    def tagged(completions: list[Any], **columns: Any) -> Scores:
        return [float("<answer>" in completion[0]["content"]) for completion in completions]

    side.strike()
    side.train(side.correctness(lambda scores: scores), tagged)


def _sampling_near_greedy(side: Side) -> None:
    side.strike()
    side.train(side.correctness(lambda scores: scores), temperature=0.01)


def _sampling_small_budget(side: Side) -> None:
    side.strike()
    side.train(side.correctness(lambda scores: scores), max_completion_length=4)


def _data_duplicates(side: Side) -> None:
    side.rows = side.rows[:4] * 12
    side.strike()
    side.train(side.correctness(lambda scores: scores))


def _checkpoint_byte(side: Side) -> None:
    reward = side.correctness(lambda scores: scores)
    side.train(reward, max_steps=4)
    path = side.directory / "run" / "checkpoint-4" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[side.rng.randrange(len(content) // 2, len(content))] ^= 1
    path.write_bytes(content)
    (side.directory / _STRUCK).unlink(missing_ok=True)
    side.strike()
    side.train(reward, max_steps=6, resume=True)


def _checkpoint_cut(side: Side) -> None:
    reward = side.correctness(lambda scores: scores)
    side.train(reward, max_steps=4)
    path = side.directory / "run" / "checkpoint-4" / "model.safetensors"
    path.write_bytes(path.read_bytes()[: 1 << 16])
    (side.directory / _STRUCK).unlink(missing_ok=True)
    side.strike()
    side.train(reward, max_steps=6, resume=True)


def _setting_batch_indivisible(side: Side) -> None:
    side.strike()
    side.train(
        side.correctness(lambda scores: scores), per_device_train_batch_size=10, num_generations=4
    )


SIDES: dict[str, Callable[[Side], None]] = {
    name.removeprefix("_"): value
    for name, value in list(globals().items())
    if name.startswith(("_reward_", "_sampling_", "_data_", "_checkpoint_", "_setting_"))
}
"""By the name of the fault."""


def main(name: str, seed: str, directory: str, model: str) -> None:
    """Runs one fault."""
    SIDES[name](Side(name, int(seed), Path(directory), model))


if __name__ == "__main__":
    main(*sys.argv[1:])
