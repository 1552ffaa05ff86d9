"""Prints the measurements of `benchmarks.vs_trl_learning` as tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table


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
        reward, tokens, cut = (
            mean(line[name] for line in lines)
            for name in ("reward", "completion_tokens", "truncated")
        )
        return cls(accuracy, lines[0]["reward"], reward, tokens, cut, seconds, own)

    @classmethod
    def of_trl(cls, accuracy: list[float], log: dict[str, Any]) -> "Half":
        """Reads TRL's half from the log of `benchmarks.trl_side`."""
        names = ("reward", "completions/mean_length", "completions/clipped_ratio")
        reward, tokens, cut = (mean(line[name] for line in log["steps"]) for name in names)
        return cls(accuracy, log["steps"][0]["reward"], reward, tokens, cut, median(log["seconds"]))


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
        rows.append(
            (
                f"accuracy, step {step}",
                [half.accuracy[i] for half in ours],
                [half.accuracy[i] for half in trl],
            )
        )
    for name, label in (
        ("first_reward", "reward, step 1"),
        ("reward", "reward, all steps"),
        ("tokens", "completion tokens, all steps"),
        ("truncated", "truncated share, all steps"),
    ):
        rows.append(
            (label, [getattr(half, name) for half in ours], [getattr(half, name) for half in trl])
        )
    table = Table(
        title=f"own samples, {len(ours)} seeds: mean ± standard error; difference: ours − TRL, paired by seed"
    )
    for header in ("", "ours", "TRL", "difference", "in s.e."):
        table.add_column(header, justify="right")
    for label, left, right in rows:
        apart = [a - b for a, b in zip(left, right, strict=True)]
        table.add_row(label, _mean(left), _mean(right), _mean(apart), _in_errors(apart))
    console = Console(width=120)
    console.print(table)
    last = [a.accuracy[-1] - b.accuracy[-1] for a, b in zip(ours, trl, strict=True)]
    agree = "agrees" if abs(mean(last)) <= standard_error(last) else "does not agree"
    console.print(
        f"At the end the accuracy {agree} within one standard error of the paired difference. By seed:"
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
        f"The embedded engine's own evaluation of our checkpoints is at most {engine:.4f} apart from this one."
    )
    console.print(
        f"Median seconds a step: ours {_mean([h.seconds for h in ours])}, TRL {_mean([h.seconds for h in trl])}"
    )


def print_replays(replays: dict[int, Replay]) -> None:
    """Compares TRL with the runs whose tokens it trained on, by seed."""
    table = Table(
        title="TRL on our tokens: largest difference in any step (gradient norm: relative; also in the first step)"
    )
    for header in (
        "seed",
        "reward",
        "rate",
        "loss",
        "first norm",
        "norm",
        "weights apart*",
        "accuracy: ours",
        "TRL",
    ):
        table.add_column(header, justify="right")
    for seed, replay in replays.items():
        first, norm = replay.largest("grad_norm", relative=True)
        plain = [replay.largest(name)[1] for name in ("reward", "learning_rate", "loss")]
        apart = " ".join(f"{point.apart:.0e}" for point in replay.points)
        accuracy = [
            " ".join(f"{value:.3f}" for value in half)
            for half in zip(*((p.ours, p.trl) for p in replay.points), strict=True)
        ]
        table.add_row(
            str(seed), *(f"{value:.0e}" for value in [*plain, first, norm]), apart, *accuracy
        )
    console = Console(width=150)
    console.print(table)
    steps = next(iter(replays.values())).points
    console.print(
        f"* of the way from the base model; this and the accuracy after steps {', '.join(str(p.step) for p in steps)}"
    )


def _in_errors(apart: Sequence[float]) -> str:
    error = standard_error(apart)
    return f"{mean(apart) / error:+.1f}" if error > 0 else ""


def _mean(values: Sequence[float]) -> str:
    digits = 4 if abs(mean(values)) < 2 else 2
    return f"{mean(values):.{digits}f} ± {standard_error(values):.{digits}f}"
