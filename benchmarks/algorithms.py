"""Every recipe on the built-in task: accuracy over steps, several seeds, one table and one plot.

`python -m benchmarks.algorithms [--seeds 3] [--steps 30] [--plot FILE.png]` trains each recipe in a process of its own,
with the settings of the demo otherwise. Needs the tiny base model (`make demo` or `make test` makes it).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.algorithm import RECIPES
from common.config import load
from trainer import train_in_process
from trainer.record import read_lines

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt

EVERY = 5


def one(recipe: str, seed: int, steps: int, directory: Path) -> None:
    """One run; its evaluations are in `directory`."""
    words = [
        *("--config", "jobgroup/configs/tiny-cpu.yaml", "--algorithm.name", recipe, "--seed", str(seed)),
        *("--trainer.run_dir", str(directory), "--state_dir", str(directory / "state"), "--trainer.max_steps", str(steps)),
        *("--trainer.eval_every", str(EVERY), "--trainer.eval_pass_samples", "0", "--trainer.checkpoint_every", "0"),
    ]
    if RECIPES[recipe].get("dynamic_sampling"):
        words += ["--algorithm.dynamic_sampling_rounds", "40"]  # late in the run most groups are all right
    train_in_process(load(words, {}), Console(quiet=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plot", type=Path, help="write the curves here, as PNG")
    parser.add_argument("--one", nargs=3, metavar=("RECIPE", "SEED", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], int(options.one[1]), options.steps, Path(options.one[2]))
        return
    steps = list(range(0, options.steps + 1, EVERY))
    table = Table(title=f"held-out greedy accuracy, mean of {options.seeds} seeds")
    for header in ("recipe", *(f"step {step}" for step in steps), "± at the end", "generated tokens"):
        table.add_column(header, justify="right")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    with tempfile.TemporaryDirectory() as temporary:
        runs = [(recipe, seed) for recipe in RECIPES for seed in range(options.seeds)]
        for recipe, seed in track(runs, description="training"):
            directory = str(Path(temporary) / f"{recipe}-{seed}")
            command = [sys.executable, "-m", "benchmarks.algorithms", "--steps", str(options.steps)]
            subprocess.run([*command, "--one", recipe, str(seed), directory], check=True)
        for recipe in RECIPES:
            places = [Path(temporary) / f"{recipe}-{seed}" for seed in range(options.seeds)]
            curves = [[line["accuracy"] for line in read_lines(place / "evaluations.jsonl")] for place in places]
            tokens = [_tokens(place) for place in places]
            means = [mean(values) for values in zip(*curves, strict=True)]
            spread = stdev(curve[-1] for curve in curves) if len(curves) > 1 else 0.0
            table.add_row(recipe, *(f"{value:.3f}" for value in means), f"{spread:.3f}", f"{mean(tokens):,.0f}")
            axes.plot(steps, means, marker="o", label=recipe)
    Console(width=140).print(table)
    axes.set(xlabel="step", ylabel="held-out greedy accuracy", ylim=(0, 1.02), title="The built-in task")
    axes.legend()
    if options.plot:
        figure.savefig(options.plot, dpi=110)


def _tokens(place: Path) -> float:
    """Tokens generated for training: of the batches and of the groups that dynamic sampling put aside."""
    lines = read_lines(place / "metrics.jsonl")
    used = sum(line["completion_tokens"] * 256 for line in lines)
    aside = lines[-1]["dropped"].get("equal_rewards", 0)
    return float(used + aside * 8 * mean(line["completion_tokens"] for line in lines))


if __name__ == "__main__":
    main()
