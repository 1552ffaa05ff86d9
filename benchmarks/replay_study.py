"""Does reuse help? Measures accuracy per generated token with 0, 25 and 50 % reuse, corrected or
not.

`python -m benchmarks.replay_study [--seeds 3] [--steps 30] [--plot FILE.png]` trains on the
built-in task. Every arm may generate as many tokens as the first one needs for its steps; with
reuse, it makes more updates from them. Needs the tiny base model (`make demo` creates it).
"""

import argparse
import math
import tempfile
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.learning import Curve, mean_curve, train

mpl.use("Agg")  # must precede pyplot; needs no display

import matplotlib.pyplot as plt

EVERY = 2
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the first arm's generated tokens at which the accuracies are compared."""
Arm = tuple[float, tuple[str, ...]]
"""The multiple of updates from the same generated tokens, and the settings."""


def _reuse(ratio: float, *more: str) -> Arm:
    return 1 / (1 - ratio), ("--replay.reuse_ratio", str(ratio), *more)


ARMS: dict[str, Arm] = {
    "no reuse": (1.0, ()),
    "25 %, corrected": _reuse(0.25),
    "25 %, uncorrected": _reuse(0.25, "--replay.corrected", "false"),
    "50 %, corrected": _reuse(0.5),
    "50 %, uncorrected": _reuse(0.5, "--replay.corrected", "false"),
    "50 %, corrected, by reward": _reuse(0.5, "--replay.priority", "reward"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_study", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=30, help="steps of the arm without reuse")
    parser.add_argument("--plot", type=Path, help="write the curves here, as PNG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        curves = _run(options.seeds, options.steps, Path(temporary))
    Console(width=150).print(_table(curves))
    figure, ax = plt.subplots(figsize=(7, 5), layout="constrained")
    for name, found in curves.items():
        curve = mean_curve(found)
        ax.plot(curve.tokens, curve.accuracy, marker=".", label=name)
    ax.set(xlabel="completion tokens generated", ylabel="held-out greedy accuracy", ylim=(0, 1.02))
    ax.legend(fontsize="small")
    if options.plot:
        figure.savefig(options.plot, dpi=110)


def _run(seeds: int, steps: int, temporary: Path) -> dict[str, list[Curve]]:
    curves: dict[str, list[Curve]] = {name: [] for name in ARMS}
    for seed, name in track(
        [(seed, name) for seed in range(seeds) for name in ARMS], description="training"
    ):
        more, words = ARMS[name]
        place = temporary / f"{name}-{seed}"
        last = (
            "--seed",
            str(seed),
            "--trainer.eval_every",
            str(EVERY),
            "--trainer.max_steps",
            str(math.ceil(steps * more)),
        )
        train(place, *words, *last)
        curves[name].append(Curve.read(place))
    return curves


def _table(curves: dict[str, list[Curve]]) -> Table:
    """Tabulates accuracy at equal numbers of generated tokens; the area is its mean over all of
    them.
    """
    first = next(iter(curves.values()))
    budget = mean(curve.tokens[-1] for curve in first)
    table = Table(title=f"Held-out greedy accuracy by generated tokens, mean of {len(first)} seeds")
    headers = (f"{share * budget:,.0f}" for share in SHARES)
    for header in ("", *headers, "mean over all", "±", "updates", "CPU seconds"):
        table.add_column(header, justify="right")
    for name, found in curves.items():
        at = [mean(curve.at_tokens(share * budget) for curve in found) for share in SHARES]
        areas = [mean(curve.at_tokens(budget * i / 100) for i in range(101)) for curve in found]
        spread = stdev(areas) / math.sqrt(len(areas)) if len(areas) > 1 else 0.0
        seconds = mean(curve.cpu_seconds[-1] for curve in found)
        numbers = (
            *(f"{value:.3f}" for value in at),
            f"{mean(areas):.3f}",
            f"{spread:.3f}",
            str(found[0].steps[-1]),
        )
        table.add_row(name, *numbers, f"{seconds:.1f}")
    return table


if __name__ == "__main__":
    main()
