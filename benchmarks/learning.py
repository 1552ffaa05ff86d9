"""Compares what training learns on the built-in task, for several seeds.

`python -m benchmarks.learning recipes` trains with every recipe, `reuse` with 0, 25 and 50 % of
reused experience, and `distillation` with rewards, with a teacher (trained first, by GRPO, and
served with the embedded engine) and with both. Each run is a process of its own, otherwise with the
demo's settings. Needs the tiny base model (`make demo` or `make test` creates it).

The accuracy is greedy, on held-out problems. Arms are compared at equal numbers of generated
tokens, as shares of those of the first arm.
"""

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import command_parser, figures_table, setting_words
from benchmarks.processes import calling, engine_command, local_url, processes, run
from common.settings.algorithm import RECIPES
from common.settings.config import Config, load
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.checkpoint import newest

CONFIG = "jobgroup/configs/tiny-cpu.yaml"
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the first arm's generated tokens at which the accuracies are compared."""
TEACHER_STEPS = 60
Settings = Mapping[str, object]

RECIPE_SETTINGS: dict[str, dict[str, object]] = {
    # Late in the run, most groups are entirely right.
    "dapo": {"algorithm.dynamic_sampling_rounds": 40},
    "ppo": {"critic.learning_rate": "1e-3"},
    # require_stop would change only the sum of the rewards.
    "gdpo": {"reward.require_stop": "false"},
}
"""Settings that a recipe needs on this task besides its name."""
REUSE: dict[str, dict[str, object]] = {
    "no reuse": {"replay.reuse_ratio": 0.0},
    "25 %": {"replay.reuse_ratio": 0.25},
    "50 %": {"replay.reuse_ratio": 0.5},
    "50 %, by reward": {"replay.reuse_ratio": 0.5, "replay.priority": "reward"},
}
STUDENT: dict[str, object] = {
    "trainer.batch_size": 8,
    "sampling.group_size": 4,
    "optimizer.warmup_steps": 0,
}
"""An eighth of the demo's batch, to measure what a few tokens teach."""
STEPS = {"recipes": 25, "reuse": 30, "distillation": 20}


@dataclass
class Curve:
    """The held-out accuracy of a run, and the cost up to each evaluation."""

    steps: list[int]
    accuracy: list[float]
    tokens: list[float]
    """Completion tokens generated for training."""
    cpu_seconds: float
    """CPU seconds of the run without evaluation."""

    @classmethod
    def read(cls, directory: Path) -> "Curve":
        """Reads the curve from a run directory."""
        config = Config.model_validate_json((directory / "config.json").read_text())
        tokens = [0.0]
        seconds = 0.0
        dropped_before = 0
        for line in read_lines(directory / "metrics.jsonl"):
            # Dynamic sampling drops groups that were generated; the count is over the whole run.
            dropped = line["dropped"].get("zero_variance", 0)
            groups = config.trainer.batch_size - line["reused_groups"] + dropped - dropped_before
            dropped_before = dropped
            completions = groups * config.sampling.group_size
            tokens.append(tokens[-1] + completions * line["completion_tokens"])
            seconds += line["cpu_seconds"]

        evaluations = read_lines(directory / "evaluations.jsonl")
        steps = [line["step"] for line in evaluations]
        return cls(
            steps=steps,
            accuracy=[line["accuracy"] for line in evaluations],
            tokens=[tokens[step] for step in steps],
            cpu_seconds=seconds,
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


def run_words(directory: Path, settings: Settings) -> list[str]:
    """Returns the arguments of a run in `directory`. The settings may name another configuration
    than the demo's.
    """
    own: Settings = {
        "config": CONFIG,
        "evaluation.pass_samples": 0,
        "checkpoint.every": 0,
        **settings,
        "trainer.run_dir": directory,
        "state_dir": directory / "state",
    }
    return setting_words(own)


def train(directory: Path, settings: Settings, *, threads: int = 1) -> None:
    """Makes a run in `directory`, which must not contain another run, in a process of its own."""
    command = calling(train_here, run_words(directory, settings))
    log = directory.with_suffix(".txt")
    run(log, sys.executable, *command, OMP_NUM_THREADS=str(threads))


def train_here(words: list[str]) -> None:
    train_in_process(load(words, {}), Console(quiet=True))


def train_each(arms: Mapping[str, Settings], seeds: int, directory: Path) -> dict[str, list[Curve]]:
    """Makes runs of every arm, given by its settings, in turn; returns their curves by arm."""
    curves: dict[str, list[Curve]] = {arm: [] for arm in arms}
    turns = list(itertools.product(range(seeds), enumerate(arms)))
    for seed, (number, arm) in track(turns, description="training"):
        place = directory / f"{number}-{seed}"
        train(place, {**arms[arm], "seed": seed})
        curves[arm].append(Curve.read(place))
    return curves


def recipe_arms(recipes: list[str], steps: int) -> dict[str, Settings]:
    arms: dict[str, Settings] = {}
    for recipe in recipes:
        own = RECIPE_SETTINGS.get(recipe, {})
        length = {"trainer.max_steps": steps, "evaluation.every": 5}
        arms[recipe] = {"algorithm.name": recipe, **own, **length}
    return arms


def reuse_arms(steps: int) -> dict[str, Settings]:
    """Returns arms that generate as many tokens as the first one needs for its steps; with reuse,
    they make more updates from them.
    """
    arms: dict[str, Settings] = {}
    for name, settings in REUSE.items():
        updates = math.ceil(steps / (1 - float(str(settings["replay.reuse_ratio"]))))
        arms[name] = {**settings, "trainer.max_steps": updates, "evaluation.every": 2}
    return arms


def distillation_arms(steps: int, teacher_url: str) -> dict[str, Settings]:
    own = {**STUDENT, "trainer.max_steps": steps, "evaluation.every": 2}
    return {
        "reward alone (grpo)": {**own, "algorithm.name": "grpo"},
        "teacher alone (opd)": {**own, "algorithm.name": "opd", "teacher.url": teacher_url},
        "reward and teacher": {**own, "algorithm.name": "grpo", "teacher.url": teacher_url},
    }


def accuracy_table(curves: dict[str, list[Curve]], best: float) -> Table:
    """Tabulates the accuracy by generated tokens, and the tokens that an arm generates until it is
    50 and 90 % of the way from the base model to the accuracy `best`.
    """
    first = next(iter(curves.values()))
    base = first[0].accuracy[0]
    budget = mean(curve.tokens[-1] for curve in first)
    targets = [base + share * (best - base) for share in (0.5, 0.9)]
    table = figures_table(
        f"held-out greedy accuracy by generated tokens, mean of {len(first)} seeds",
        [
            "",
            *(f"{share * budget:,.0f}" for share in SHARES),
            "mean over all",
            "±",
            "at the end",
            "±",
            *(f"tokens to {target:.2f}" for target in targets),
            "updates",
            "tokens",
            "CPU s",
        ],
    )
    for name, found in curves.items():
        at_shares = []
        for share in SHARES:
            accuracy = mean(curve.at_tokens(share * budget) for curve in found)
            at_shares.append(f"{accuracy:.3f}")
        areas = [mean(curve.at_tokens(budget * i / 100) for i in range(101)) for curve in found]
        ends = [curve.accuracy[-1] for curve in found]
        table.add_row(
            name,
            *at_shares,
            f"{mean(areas):.3f}",
            f"{_standard_error(areas):.3f}",
            f"{mean(ends):.3f}",
            f"{_standard_error(ends):.3f}",
            *(_tokens_until(found, target) for target in targets),
            str(found[0].steps[-1]),
            f"{mean(curve.tokens[-1] for curve in found):,.0f}",
            f"{mean(curve.cpu_seconds for curve in found):.1f}",
        )
    return table


def _standard_error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _tokens_until(curves: list[Curve], target: float) -> str:
    """Returns the mean tokens generated until this accuracy, or a dash if a run misses it."""
    reached = [interpolated(curve.accuracy, curve.tokens, target) for curve in curves]
    found = [tokens for tokens in reached if tokens is not None]
    return f"{mean(found):,.0f}" if len(found) == len(curves) else "–"


def compare(options: argparse.Namespace) -> None:
    steps = options.steps or STEPS[options.study]
    best = 1.0
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        place = Path(temporary)
        if options.study == "distillation":
            train(
                place / "teacher",
                {"seed": 100, "trainer.max_steps": TEACHER_STEPS, "checkpoint.every": 20},
            )
            best = Curve.read(place / "teacher").accuracy[-1]
            model = newest(place / "teacher" / "checkpoints")
            assert model is not None
            url = local_url()
            engine = engine_command(model, url, max_context_tokens=256)
            stack.enter_context(processes([engine], [url]))
            arms = distillation_arms(steps, url)
        elif options.study == "reuse":
            arms = reuse_arms(steps)
        else:
            arms = recipe_arms(options.recipes, steps)
        curves = train_each(arms, options.seeds, place)
    Console(width=180).print(accuracy_table(curves, best))


def main() -> None:
    parser = command_parser("benchmarks.learning", __doc__)
    parser.add_argument("study", choices=STEPS, nargs="?", default="recipes")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (default 3)")
    parser.add_argument("--steps", type=int, help=f"steps of the first arm (default {STEPS})")
    # opd needs a teacher: see the study `distillation`.
    recipes = [name for name in RECIPES if name != "opd"]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
