"""Compares all recipes on the built-in task: accuracy over steps and CPU seconds, for several
seeds, as table and plot.

`python -m benchmarks.algorithms [--seeds 3] [--steps 25] [--plot FILE.png]` trains each recipe in a
separate process, otherwise with the demo's settings. Needs the tiny base model (`make demo` or
`make test` creates it).
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.learning import Curve, mean_curve, train
from common.settings.algorithm import RECIPES

mpl.use("Agg")  # must precede pyplot; needs no display

import matplotlib.pyplot as plt

EVERY = 5
BESIDE: dict[str, tuple[str, ...]] = {
    "dapo": (
        "--algorithm.dynamic_sampling_rounds",
        "40",
    ),  # late in the run, most groups are entirely right
    "ppo": ("--critic.learning_rate", "1e-3"),
    "gdpo": (
        "--reward.require_stop",
        "false",
    ),  # require_stop would change only the sum of the rewards
}
"""Settings a recipe needs on this task besides its name."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--plot", type=Path, help="write the curves here, as PNG")
    recipes = [
        name for name in RECIPES if name != "opd"
    ]  # needs a teacher; see benchmarks.distillation
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes)
    options = parser.parse_args()
    curves: dict[str, list[Curve]] = {recipe: [] for recipe in options.recipes}
    with tempfile.TemporaryDirectory() as temporary:
        runs = [(recipe, seed) for seed in range(options.seeds) for recipe in options.recipes]
        for recipe, seed in track(runs, description="training"):
            place = Path(temporary) / f"{recipe}-{seed}"
            words = ("--algorithm.name", recipe, "--seed", str(seed), *BESIDE.get(recipe, ()))
            train(
                place,
                *words,
                "--trainer.max_steps",
                str(options.steps),
                "--trainer.eval_every",
                str(EVERY),
            )
            curves[recipe].append(Curve.read(place))
    Console(width=150).print(_table(curves))
    if options.plot:
        _plot({recipe: mean_curve(found) for recipe, found in curves.items()}, options.plot)


def _table(curves: dict[str, list[Curve]]) -> Table:
    steps = next(iter(curves.values()))[0].steps
    table = Table(
        title=f"held-out greedy accuracy, mean of {len(next(iter(curves.values())))} seeds"
    )
    for header in (
        "recipe",
        *(f"step {step}" for step in steps),
        "± at the end",
        "generated tokens",
        "CPU seconds",
    ):
        table.add_column(header, justify="right")
    for recipe, found in curves.items():
        spread = stdev(curve.accuracy[-1] for curve in found) if len(found) > 1 else 0.0
        accuracies = (f"{value:.3f}" for value in mean_curve(found).accuracy)
        spent = (
            mean(curve.tokens[-1] for curve in found),
            mean(curve.cpu_seconds[-1] for curve in found),
        )
        table.add_row(recipe, *accuracies, f"{spread:.3f}", f"{spent[0]:,.0f}", f"{spent[1]:.1f}")
    return table


def _plot(means: dict[str, Curve], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    for recipe, curve in means.items():
        axes[0].plot(curve.steps, curve.accuracy, marker="o", label=recipe)
        axes[1].plot(curve.cpu_seconds, curve.accuracy, marker="o", label=recipe)
    axes[0].set(
        xlabel="step", ylabel="held-out greedy accuracy", ylim=(0, 1.02), title="The built-in task"
    )
    axes[1].set(xlabel="CPU seconds of the process, evaluation left out")
    axes[1].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
