"""Prints the measurements of `benchmarks.vs_trl_learning` as tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console

from benchmarks.command import figures_table


@dataclass(frozen=True)
class Half:
    """A run of one trainer; means are over its steps."""

    accuracy: list[float]
    """Held-out greedy accuracy at the compared steps, measured by the common evaluator."""
    first_reward: float
    """Reward of the first batch, which both trainers sample from the base model."""
    reward: float
    """Mean reward of the trained completions."""
    tokens: float
    """Mean length of a completion."""
    truncated: float
    """Share of completions truncated at the limit."""
    seconds: float
    """Median seconds of a step."""
    own_accuracy: list[float] | None = None
    """Accuracy by the run's own evaluation with the embedded engine (this trainer only)."""

    @classmethod
    def of_ours(
        cls, accuracy: list[float], lines: Sequence[dict[str, Any]], own: list[float]
    ) -> "Half":
        """Reads this trainer's half from the lines of `metrics.jsonl`."""
        seconds = median(
            sum(line["seconds"].values()) - line["seconds"].get("evaluation", 0.0) for line in lines
        )
        return cls(
            accuracy=accuracy,
            first_reward=lines[0]["reward"],
            reward=mean(line["reward"] for line in lines),
            tokens=mean(line["completion_tokens"] for line in lines),
            truncated=mean(line["truncated"] for line in lines),
            seconds=seconds,
            own_accuracy=own,
        )

    @classmethod
    def of_trl(cls, accuracy: list[float], log: dict[str, Any]) -> "Half":
        """Reads TRL's half from the log of `benchmarks.trl_side`."""
        steps = log["steps"]
        return cls(
            accuracy=accuracy,
            first_reward=steps[0]["reward"],
            reward=mean(line["reward"] for line in steps),
            tokens=mean(line["completions/mean_length"] for line in steps),
            truncated=mean(line["completions/clipped_ratio"] for line in steps),
            seconds=median(log["seconds"]),
        )


@dataclass(frozen=True)
class Point:
    """The two checkpoints after one step of a replay."""

    step: int
    ours: float
    """Held-out greedy accuracy."""
    trl: float
    apart: float
    """Distance between the two in weight space, as a share of this trainer's distance from the base
    model."""


@dataclass(frozen=True)
class Replay:
    """TRL's training on the tokens of this trainer's run."""

    ours: list[dict[str, Any]]
    """Lines of `metrics.jsonl`."""
    trl: list[dict[str, Any]]
    points: list[Point]

    def largest(self, name: str, relative: bool = False) -> tuple[float, float]:
        """Returns the largest difference in an update metric: in the first step, and in any
        step.
        """
        pairs = [
            (a["update"].get(name, a.get(name)), b[name])
            for a, b in zip(self.ours, self.trl, strict=True)
        ]
        apart = [abs(a - b) / (abs(a) if relative else 1) for a, b in pairs]
        return apart[0], max(apart)


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def print_free(steps: Sequence[int], ours: Sequence[Half], trl: Sequence[Half]) -> None:
    """Compares halves that sampled on their own: means, paired differences, standard errors, and
    the verdict.
    """
    rows: list[tuple[str, list[float], list[float]]] = []
    for i, step in enumerate(steps):
        left = [half.accuracy[i] for half in ours]
        right = [half.accuracy[i] for half in trl]
        rows.append((f"accuracy, step {step}", left, right))
    for name, label in (
        ("first_reward", "reward, step 1"),
        ("reward", "reward, all steps"),
        ("tokens", "completion tokens, all steps"),
        ("truncated", "truncated share, all steps"),
    ):
        left = [getattr(half, name) for half in ours]
        right = [getattr(half, name) for half in trl]
        rows.append((label, left, right))
    table = figures_table(
        f"own samples, {len(ours)} seeds: mean ± standard error; "
        "difference: ours − TRL, paired by seed",
        ["", "ours", "TRL", "difference", "in s.e."],
    )
    for label, left, right in rows:
        apart = [a - b for a, b in zip(left, right, strict=True)]
        table.add_row(label, _mean(left), _mean(right), _mean(apart), _in_errors(apart))
    console = Console(width=120)
    console.print(table)
    last = [a.accuracy[-1] - b.accuracy[-1] for a, b in zip(ours, trl, strict=True)]
    agree = "agrees" if abs(mean(last)) <= standard_error(last) else "does not agree"
    console.print(
        f"At the end the accuracy {agree} within one standard error of the paired difference. "
        "By seed:"
    )
    for label, halves in (("ours", ours), ("TRL", trl)):
        console.print(
            f"  {label:>4}: {' '.join(f'{half.accuracy[-1]:.3f}' for half in halves)}",
            highlight=False,
        )
    engine = max(
        abs(a - b)
        for half in ours
        for a, b in zip(half.accuracy, half.own_accuracy or [], strict=True)
    )
    console.print(
        "The embedded engine's own evaluation of our checkpoints "
        f"is at most {engine:.4f} apart from this one."
    )
    our_s = _mean([half.seconds for half in ours])
    trl_s = _mean([half.seconds for half in trl])
    console.print(f"Median seconds a step: ours {our_s}, TRL {trl_s}")


def print_replays(replays: dict[int, Replay]) -> None:
    """Compares TRL with the runs whose tokens it trained on, by seed."""
    differences = ("reward", "rate", "loss", "first norm", "norm", "weights apart*")
    table = figures_table(
        "TRL on our tokens: largest difference in any step "
        "(gradient norm: relative; also in the first step)",
        ["seed", *differences, "accuracy: ours", "TRL"],
    )
    for seed, replay in replays.items():
        first, norm = replay.largest("grad_norm", relative=True)
        plain = [replay.largest(name)[1] for name in ("reward", "learning_rate", "loss")]
        apart = " ".join(f"{point.apart:.0e}" for point in replay.points)
        ours = " ".join(f"{point.ours:.3f}" for point in replay.points)
        trl = " ".join(f"{point.trl:.3f}" for point in replay.points)
        figures = [f"{value:.0e}" for value in [*plain, first, norm]]
        table.add_row(str(seed), *figures, apart, ours, trl)
    console = Console(width=150)
    console.print(table)
    points = next(iter(replays.values())).points
    steps = ", ".join(str(point.step) for point in points)
    console.print(f"* of the way from the base model; this and the accuracy after steps {steps}")


def _in_errors(apart: Sequence[float]) -> str:
    error = standard_error(apart)
    return f"{mean(apart) / error:+.1f}" if error > 0 else ""


def _mean(values: Sequence[float]) -> str:
    digits = 4 if abs(mean(values)) < 2 else 2
    return f"{mean(values):.{digits}f} ± {standard_error(values):.{digits}f}"
