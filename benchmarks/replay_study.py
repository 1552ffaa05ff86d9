"""Does reuse help? Accuracy for each generated token with 0, 25 and 50 % reuse, corrected and not, on the built-in task.

`python -m benchmarks.replay_study [--seeds 3] [--steps 30] [--plot FILE.png]`. Every arm may generate the tokens that the
first one needs for its steps: with reuse it makes more updates for them. A second table is about mixing earlier successes
into failed groups (RLEP), on few prompts that come again and again. Needs the tiny base model (`make demo` makes it).
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

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt

EVERY = 2
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the tokens that the first arm generates: where the accuracies are compared."""
Arm = tuple[float, tuple[str, ...]]
"""Updates for the same generated tokens, as a multiple, and settings."""


def _reuse(ratio: float, *more: str) -> Arm:
    return 1 / (1 - ratio), ("--replay.reuse_ratio", str(ratio), *more)


REUSE: dict[str, Arm] = {
    "no reuse": (1.0, ()),
    "25 %, corrected": _reuse(0.25),
    "25 %, uncorrected": _reuse(0.25, "--replay.corrected", "false"),
    "50 %, corrected": _reuse(0.5),
    "50 %, uncorrected": _reuse(0.5, "--replay.corrected", "false"),
    "50 %, corrected, by difficulty": _reuse(0.5, "--replay.priority", "difficulty"),
    "50 %, corrected, by recency": _reuse(0.5, "--replay.priority", "recency"),
    "50 %, corrected, by reward": _reuse(0.5, "--replay.priority", "reward"),
}
_FEW = ("--data.num_samples", "64", "--trainer.num_epochs", "1000", "--sampling.group_size", "4")
MIXING: dict[str, Arm] = {
    "64 prompts, nothing mixed in": (1.0, _FEW),
    "64 prompts, 1 success mixed in": (1.0, (*_FEW, "--replay.mix_successes", "1")),
    "64 prompts, 2 successes mixed in": (1.0, (*_FEW, "--replay.mix_successes", "2")),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_study", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=30, help="of the arm without reuse")
    parser.add_argument("--plot", type=Path, help="write the curves here, as PNG")
    options = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    with tempfile.TemporaryDirectory() as temporary:
        for ax, (title, arms) in zip(axes, {"reuse": REUSE, "mixing": MIXING}.items(), strict=True):
            curves = _run(arms, options.seeds, options.steps, Path(temporary))
            Console(width=150).print(_table(title, curves))
            for name, found in curves.items():
                curve = mean_curve(found)
                ax.plot(curve.tokens, curve.accuracy, marker=".", label=name)
            ax.set(xlabel="completion tokens generated", ylim=(0, 1.02), title=title)
            ax.legend(fontsize="small")
    axes[0].set_ylabel("held-out greedy accuracy")
    if options.plot:
        figure.savefig(options.plot, dpi=110)


def _run(arms: dict[str, Arm], seeds: int, steps: int, temporary: Path) -> dict[str, list[Curve]]:
    curves: dict[str, list[Curve]] = {name: [] for name in arms}
    for seed, name in track([(seed, name) for seed in range(seeds) for name in arms], description="training"):
        more, words = arms[name]
        place = temporary / f"{name}-{seed}"
        last = ("--seed", str(seed), "--trainer.eval_every", str(EVERY), "--trainer.max_steps", str(math.ceil(steps * more)))
        train(place, *words, *last)
        curves[name].append(Curve.read(place))
    return curves


def _table(title: str, curves: dict[str, list[Curve]]) -> Table:
    """Accuracy at equal numbers of generated tokens; the area is its mean over them all."""
    first = next(iter(curves.values()))
    budget = mean(curve.tokens[-1] for curve in first)
    table = Table(title=f"{title}: held-out greedy accuracy by generated tokens, mean of {len(first)} seeds")
    headers = (f"{share * budget:,.0f}" for share in SHARES)
    for header in ("", *headers, "mean over all", "±", "updates", "CPU seconds"):
        table.add_column(header, justify="right")
    for name, found in curves.items():
        at = [mean(curve.at_tokens(share * budget) for curve in found) for share in SHARES]
        areas = [mean(curve.at_tokens(budget * i / 100) for i in range(101)) for curve in found]
        spread = stdev(areas) / math.sqrt(len(areas)) if len(areas) > 1 else 0.0
        seconds = mean(curve.cpu_seconds[-1] for curve in found)
        numbers = (*(f"{value:.3f}" for value in at), f"{mean(areas):.3f}", f"{spread:.3f}", str(found[0].steps[-1]))
        table.add_row(name, *numbers, f"{seconds:.1f}")
    return table


if __name__ == "__main__":
    main()
