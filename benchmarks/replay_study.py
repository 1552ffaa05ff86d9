"""Does reuse help? Measures accuracy per generated token with 0, 25 and 50 % reuse, corrected or
not.

`python -m benchmarks.replay_study [--seeds 3] [--steps 30] [--plot FILE.png]` trains on the
built-in task. Every arm may generate as many tokens as the first one needs for its steps; with
reuse, it makes more updates from them. Needs the tiny base model (`make demo` creates it).
"""

import math
import tempfile
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from benchmarks.command import command_parser, figures_table
from benchmarks.learning import Curve, mean_curve, train_each

mpl.use("Agg")  # must precede pyplot; needs no display

import matplotlib.pyplot as plt

EVERY = 2
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the first arm's generated tokens at which the accuracies are compared."""
ARMS: dict[str, dict[str, object]] = {
    "no reuse": {"replay.reuse_ratio": 0.0},
    "25 %": {"replay.reuse_ratio": 0.25},
    "50 %": {"replay.reuse_ratio": 0.5},
    "50 %, by reward": {"replay.reuse_ratio": 0.5, "replay.priority": "reward"},
}


def main() -> None:
    parser = command_parser("replay_study", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=30, help="steps of the arm without reuse")
    parser.add_argument("--plot", type=Path, help="write the curves here, as PNG")
    options = parser.parse_args()
    kinds = {}
    for name, settings in ARMS.items():
        # As many updates as the same generated tokens allow.
        updates = math.ceil(options.steps / (1 - float(str(settings["replay.reuse_ratio"]))))
        length = {"trainer.max_steps": updates, "trainer.eval_every": EVERY}
        kinds[name] = {**settings, **length}
    with tempfile.TemporaryDirectory() as temporary:
        curves = train_each(kinds, options.seeds, Path(temporary))
    Console(width=150).print(_table(curves))
    figure, ax = plt.subplots(figsize=(7, 5), layout="constrained")
    for name, found in curves.items():
        curve = mean_curve(found)
        ax.plot(curve.tokens, curve.accuracy, marker=".", label=name)
    ax.set(xlabel="completion tokens generated", ylabel="held-out greedy accuracy", ylim=(0, 1.02))
    ax.legend(fontsize="small")
    if options.plot:
        figure.savefig(options.plot, dpi=110)


def _table(curves: dict[str, list[Curve]]) -> Table:
    """Tabulates accuracy at equal numbers of generated tokens; the area is its mean over all of
    them.
    """
    first = next(iter(curves.values()))
    budget = mean(curve.tokens[-1] for curve in first)
    budgets = [f"{share * budget:,.0f}" for share in SHARES]
    table = figures_table(
        f"Held-out greedy accuracy by generated tokens, mean of {len(first)} seeds",
        ["", *budgets, "mean over all", "±", "updates", "CPU seconds"],
    )
    for name, found in curves.items():
        at = []
        for share in SHARES:
            accuracy = mean(curve.at_tokens(share * budget) for curve in found)
            at.append(f"{accuracy:.3f}")
        areas = [mean(curve.at_tokens(budget * i / 100) for i in range(101)) for curve in found]
        spread = stdev(areas) / math.sqrt(len(areas)) if len(areas) > 1 else 0.0
        updates = str(found[0].steps[-1])
        seconds = mean(curve.cpu_seconds[-1] for curve in found)
        figures = [*at, f"{mean(areas):.3f}", f"{spread:.3f}", updates, f"{seconds:.1f}"]
        table.add_row(name, *figures)
    return table


if __name__ == "__main__":
    main()
