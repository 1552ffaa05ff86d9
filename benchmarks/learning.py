"""Makes training runs on the built-in task for the benchmarks, each in a separate process, and
reads their curves.

`python -m benchmarks.learning DIRECTORY [SETTINGS…]` makes one run, otherwise with the demo's
settings.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console

from common.settings.config import Config, load
from trainer import train_in_process
from trainer.observe.run_dir import read_lines

CONFIG = "jobgroup/configs/tiny-cpu.yaml"


@dataclass
class Curve:
    """The held-out greedy accuracy of a run, and the cost up to each evaluation."""

    steps: list[int]
    accuracy: list[float]
    tokens: list[float]
    """Completion tokens generated for training."""
    cpu_seconds: list[float]
    """CPU seconds without evaluation."""

    @classmethod
    def read(cls, directory: Path) -> "Curve":
        """Reads the curve from a run directory."""
        config = Config.model_validate_json((directory / "config.json").read_text())
        size, batch = config.sampling.group_size, config.trainer.batch_size
        evaluations, tokens, seconds = read_lines(directory / "evaluations.jsonl"), [0.0], [0.0]
        aside = 0
        for line in read_lines(directory / "metrics.jsonl"):
            dropped = line["dropped"].get("zero_variance", 0)
            fresh = (
                batch - line["reused_groups"] + dropped - aside
            )  # dynamic sampling sets generated groups aside
            aside = dropped
            tokens.append(tokens[-1] + fresh * size * line["completion_tokens"])
            seconds.append(seconds[-1] + line["cpu_seconds"])
        steps = [line["step"] for line in evaluations]
        accuracy = [line["accuracy"] for line in evaluations]
        return cls(
            steps, accuracy, [tokens[step] for step in steps], [seconds[step] for step in steps]
        )

    def at_tokens(self, count: float) -> float:
        """Returns the accuracy after `count` generated tokens, linear between evaluations."""
        for i, reached in enumerate(self.tokens):
            if reached >= count:
                if i == 0:
                    return self.accuracy[0]
                part = (count - self.tokens[i - 1]) / (reached - self.tokens[i - 1])
                return self.accuracy[i - 1] + part * (self.accuracy[i] - self.accuracy[i - 1])
        return self.accuracy[-1]


def train(directory: Path, *settings: str) -> None:
    """Makes a run in `directory`, which must not contain another run."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.learning", str(directory), *settings], check=True
    )


def mean_curve(curves: list[Curve]) -> Curve:
    """Returns the means over several seeds."""
    columns = {
        name: [
            mean(values) for values in zip(*(getattr(curve, name) for curve in curves), strict=True)
        ]
        for name in ("accuracy", "tokens", "cpu_seconds")
    }
    return Curve(curves[0].steps, **columns)


def _main() -> None:
    directory, *settings = sys.argv[1:]
    words = [
        *(
            "--config",
            CONFIG,
            "--trainer.run_dir",
            directory,
            "--state_dir",
            str(Path(directory) / "state"),
        ),
        *("--trainer.eval_pass_samples", "0", "--trainer.checkpoint_every", "0", *settings),
    ]
    train_in_process(load(words, {}), Console(quiet=True))


if __name__ == "__main__":
    _main()
