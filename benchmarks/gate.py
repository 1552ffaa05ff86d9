"""Fails when what a commit learns, or what it costs, leaves the band of its history.

`python -m benchmarks.gate` trains with the demo's settings and two other recipes in this process,
which takes a core about a minute, and compares every figure with the recorded runs in
`benchmarks/history`. It ends with status 1 and names the figures that are outside. `--record` also
appends them: do so for a commit that changes a figure on purpose, and say why in its message.

The built-in model is made on this machine, and its training rounds otherwise on other processors:
only runs of the same model are compared. Machines differ in speed, so costs are ratios to a fixed
computation that runs before every step, and are judged only against runs on the same kind of
machine. Time in which this thread waits for a
processor does not count, but time in which an update sleeps does.
"""

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import command_parser, figures_table, setting_words
from benchmarks.gate_history import RULES, Figures, Line, Machine, Verdict, append, judge
from common.settings.config import load
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy
from trainer.run import Listener, Run

CONFIG = "jobgroup/configs/tiny-cpu.yaml"
ARMS: dict[str, dict[str, object]] = {
    "demo": {"trainer.max_steps": 30},
    "rloo": {"algorithm.name": "rloo", "trainer.max_steps": 14},
    "ppo": {
        "algorithm.name": "ppo",
        "trainer.max_steps": 14,
        "critic.learning_rate": "1e-3",
    },
}
"""Settings of each arm besides the demo's."""
_WARM_UP_STEPS = 2
_SIZE = 192
_ROUNDS = 40


def own_seconds() -> float:
    """Returns the time that passed for this thread, without waiting for a processor."""
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        waited = 0.0
    return time.perf_counter() - waited


def reference() -> float:
    """Returns the processor time of a fixed computation: small products and a loop, as in a step.
    Not the time that passes: the engine's threads take turns with this one.
    """
    matrix = torch.full((_SIZE, _SIZE), 1 / _SIZE)
    begin = time.thread_time()
    total = 0
    for number in range(_ROUNDS):
        matrix = torch.softmax(matrix @ matrix, dim=-1)
        for item in range(500):
            total += item * number
    return time.thread_time() - begin


class _Costs(Listener):
    """Measures the reference before every step."""

    def __init__(self) -> None:
        self.references: list[float] = []
        self.updates: list[float] = []

    def on_event(self, run: Run, event: str, **about: Any) -> None:
        if event == "step_begin":
            self.references.append(reference())


@contextmanager
def _timed_updates(seconds: list[float]) -> Iterator[None]:
    """Adds the time of every update of the policy to `seconds`."""
    update = Policy.update

    def timed(*arguments: Any) -> Any:
        begin = own_seconds()
        result = update(*arguments)
        seconds.append(own_seconds() - begin)
        return result

    Policy.update = timed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Policy.update = update  # type: ignore[method-assign]


def measure(
    settings: Mapping[str, object],
    seed: int,
    train: Callable[..., object] = train_in_process,
) -> dict[str, float]:
    """Trains an arm and returns its figures, by the names in `RULES`."""
    costs = _Costs()
    with tempfile.TemporaryDirectory() as temporary, _timed_updates(costs.updates):
        directory = Path(temporary)
        own = {
            "config": CONFIG,
            "evaluation.every": 0,
            "evaluation.pass_samples": 0,
            "checkpoint.every": 0,
            "trainer.keep_groups_mb": 0,
            **settings,
            "seed": seed,
            "trainer.run_dir": directory / "run",
            "state_dir": directory / "state",
        }
        config = load(setting_words(own), {})
        train(config, Console(quiet=True), listener=costs)
        records = read_lines(directory / "run" / "metrics.jsonl")
        accuracy = read_lines(directory / "run" / "evaluations.jsonl")[-1]["accuracy"]
    return {"accuracy": float(accuracy), **_figures(records, costs)}


def _figures(records: list[dict[str, Any]], costs: _Costs) -> dict[str, float]:
    last = records[-max(1, len(records) // 4) :]
    updates = [record["update"] for record in records]
    unit = median(costs.references)
    later = slice(_WARM_UP_STEPS, None)
    paired = zip(records[later], costs.references[later], strict=True)
    cpu = median(record["cpu_seconds"] - seconds for record, seconds in paired)
    skipped = sum(update["skipped"] for update in updates)
    figures = {
        "reward": mean(record["reward"] for record in last),
        "delta_logprob": max(update["delta_logprob_current"] for update in updates),
        "loss": mean(abs(update["loss"]) for update in updates),
        "grad_norm": mean(update["grad_norm"] for update in updates),
        "entropy": mean(record["update"]["entropy"] for record in last),
        "dropped": float(sum(records[-1]["dropped"].values()) + skipped),
        "cpu": cpu / unit,
        "update": median(costs.updates[later]) / unit,
    }
    if records[-1].get("critic"):
        figures["value_loss"] = mean(record["critic"]["value_loss"] for record in last)
    return figures


def machine() -> dict[str, str]:
    """Returns what decides how the costs compare with the reference, and which model is trained."""
    model = Path(load(["--config", CONFIG], {}).model.name)
    weights = (model / "model.safetensors").read_bytes()
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__).partition("+")[0],
        "base_model": hashlib.sha256(weights).hexdigest()[:12],
    }


def commit() -> str:
    """Returns the short name of the commit, with `+` if anything but the history differs from
    it.
    """
    name = _git("rev-parse", "--short=8", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/history")
    return f"{name}+" if changed else name


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def table(verdicts: list[Verdict]) -> Table:
    """Returns the figures, their bands and the verdicts."""
    found = figures_table(
        "the history gate", ["run", "figure", "value", "band", ""], text_columns=2
    )
    for verdict in verdicts:
        band = verdict.band
        width = "fewer than 5 lines" if band is None else f"{band.low:.4g} … {band.high:.4g}"
        found.add_row(
            verdict.arm, RULES[verdict.name].text, f"{verdict.value:.4g}", width, verdict.word
        )
    return found


def record(arm: str, figures: Figures, here: Machine, seed: int) -> None:
    """Appends the figures of a run to the history of its arm."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    append(arm, Line(commit=commit(), date=date, seed=seed, machine=here, figures=figures))


def run(options: argparse.Namespace) -> int:
    """Measures and judges every arm; returns the exit status."""
    torch.set_num_threads(1)
    here = machine()
    verdicts: list[Verdict] = []
    for arm in options.arms:
        figures = measure(ARMS[arm], options.seed)
        verdicts += judge(arm, figures, here)
        if options.record:
            record(arm, figures, here, options.seed)

    Console(width=140).print(table(verdicts))
    outside = [verdict for verdict in verdicts if verdict.fails]
    for verdict in outside:
        print(f"error: {verdict.sentence}", file=sys.stderr)
    return 1 if outside and not options.record else 0


def main() -> None:
    parser = command_parser("benchmarks.gate", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs (default 0)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--record", action="store_true", help="append the figures to the history")
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
