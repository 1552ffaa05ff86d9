"""Compares all recipes on the built-in task: accuracy over steps and CPU seconds, for several
seeds, as table and plot.

`python -m benchmarks.algorithms [--seeds 3] [--steps 25] [--plot FILE.png]` trains each recipe in a
separate process, otherwise with the demo's settings. Needs the tiny base model (`make demo` or
`make test` creates it).
"""

import tempfile
from pathlib import Path
from statistics import stdev

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from benchmarks.command import command_parser, figures_table
from benchmarks.learning import Curve, mean_curve, train_each
from common.settings.algorithm import RECIPES

mpl.use("Agg")  # must precede pyplot; needs no display

import matplotlib.pyplot as plt

EVERY = 5
BESIDE: dict[str, dict[str, object]] = {
    # Late in the run, most groups are entirely right.
    "dapo": {"algorithm.dynamic_sampling_rounds": 40},
    "ppo": {"critic.learning_rate": "1e-3"},
    # require_stop would change only the sum of the rewards.
    "gdpo": {"reward.require_stop": "false"},
}
"""Settings a recipe needs on this task besides its name."""


def main() -> None:
    parser = command_parser("algorithms", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--plot", type=Path, help="write the curves here, as PNG")
    # opd needs a teacher: see benchmarks.distillation.
    recipes = [name for name in RECIPES if name != "opd"]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes)
    options = parser.parse_args()
    kinds = {}
    for recipe in options.recipes:
        own = BESIDE.get(recipe, {})
        length = {"trainer.max_steps": options.steps, "trainer.eval_every": EVERY}
        kinds[recipe] = {"algorithm.name": recipe, **own, **length}
    with tempfile.TemporaryDirectory() as temporary:
        curves = train_each(kinds, options.seeds, Path(temporary))
    Console(width=150).print(_table(curves))
    if options.plot:
        _plot({recipe: mean_curve(found) for recipe, found in curves.items()}, options.plot)


def _table(curves: dict[str, list[Curve]]) -> Table:
    first = next(iter(curves.values()))
    steps = [f"step {step}" for step in first[0].steps]
    table = figures_table(
        f"held-out greedy accuracy, mean of {len(first)} seeds",
        ["recipe", *steps, "± at the end", "generated tokens", "CPU seconds"],
    )
    for recipe, found in curves.items():
        spread = stdev(curve.accuracy[-1] for curve in found) if len(found) > 1 else 0.0
        means = mean_curve(found)
        accuracies = [f"{value:.3f}" for value in means.accuracy]
        tokens = f"{means.tokens[-1]:,.0f}"
        table.add_row(recipe, *accuracies, f"{spread:.3f}", tokens, f"{means.cpu_seconds[-1]:.1f}")
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
