"""Makes training runs on the built-in task for the benchmarks, each in a separate process, and
reads their curves.

`python -m benchmarks.learning DIRECTORY [SETTINGS…]` makes one run, otherwise with the demo's
settings.
"""

import itertools
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import track

from benchmarks.command import setting_words
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
        tokens = [0.0]
        seconds = [0.0]
        dropped_before = 0
        for line in read_lines(directory / "metrics.jsonl"):
            # Dynamic sampling drops groups that were generated; the count is over the whole run.
            dropped = line["dropped"].get("zero_variance", 0)
            groups = config.trainer.batch_size - line["reused_groups"] + dropped - dropped_before
            dropped_before = dropped
            completions = groups * config.sampling.group_size
            tokens.append(tokens[-1] + completions * line["completion_tokens"])
            seconds.append(seconds[-1] + line["cpu_seconds"])

        evaluations = read_lines(directory / "evaluations.jsonl")
        steps = [line["step"] for line in evaluations]
        return cls(
            steps=steps,
            accuracy=[line["accuracy"] for line in evaluations],
            tokens=[tokens[step] for step in steps],
            cpu_seconds=[seconds[step] for step in steps],
        )

    def at_tokens(self, count: float) -> float:
        """Returns the accuracy after `count` generated tokens, linear between evaluations."""
        found = interpolated(self.tokens, self.accuracy, count)
        return self.accuracy[-1] if found is None else found


def interpolated(xs: list[float], ys: list[float], x: float) -> float | None:
    """Returns y where the line through (xs, ys) first reaches `x`; None if it does not."""
    for i, reached in enumerate(xs):
        if reached >= x:
            if i == 0:
                return ys[0]
            part = (x - xs[i - 1]) / (reached - xs[i - 1])
            return ys[i - 1] + part * (ys[i] - ys[i - 1])
    return None


def train(directory: Path, settings: Mapping[str, object]) -> None:
    """Makes a run in `directory`, which must not contain another run."""
    command = [sys.executable, "-m", "benchmarks.learning", str(directory)]
    subprocess.run([*command, *setting_words(settings)], check=True)


def train_each(
    kinds: Mapping[str, Mapping[str, object]], seeds: int, directory: Path
) -> dict[str, list[Curve]]:
    """Makes runs of every kind, given by its settings, in turn; returns their curves by kind."""
    curves: dict[str, list[Curve]] = {kind: [] for kind in kinds}
    turns = itertools.product(range(seeds), kinds)
    for seed, kind in track(list(turns), description="training"):
        place = directory / f"{kind}-{seed}"
        train(place, {**kinds[kind], "seed": seed})
        curves[kind].append(Curve.read(place))
    return curves


def mean_curve(curves: list[Curve]) -> Curve:
    """Returns the means over several seeds."""

    def means(name: str) -> list[float]:
        columns = zip(*(getattr(curve, name) for curve in curves), strict=True)
        return [mean(column) for column in columns]

    return Curve(
        steps=curves[0].steps,
        accuracy=means("accuracy"),
        tokens=means("tokens"),
        cpu_seconds=means("cpu_seconds"),
    )


def _main() -> None:
    directory, *words = sys.argv[1:]
    settings = {
        "config": CONFIG,
        "trainer.run_dir": directory,
        "state_dir": Path(directory) / "state",
        "trainer.eval_pass_samples": 0,
        "trainer.checkpoint_every": 0,
    }
    config = load([*setting_words(settings), *words], {})
    train_in_process(config, Console(quiet=True))


if __name__ == "__main__":
    _main()
