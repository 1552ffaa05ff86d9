"""Measures what `reproducible` costs: `python -m benchmarks.reproducible [--rounds N] [--steps N]`.

Trains the built-in task in this process with and without it, in turn, with `trainer.max_staleness`
0 and 1, and compares the weights of its rounds after every step.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import command_parser, figures_table, setting_words
from common.settings.config import load
from trainer import train_in_process
from trainer.observe.run_dir import read_lines

CONFIG = Path("jobgroup/configs/tiny-cpu.yaml")
_FIRST = 2
"""Steps that are not measured: they load what later ones use."""


def lines_of(directory: Path, steps: int, *, reproducible: bool, staleness: int) -> list[Any]:
    """Trains once and returns a line for each step."""
    settings = {
        "config": CONFIG,
        "reproducible": reproducible,
        "trainer.run_dir": directory,
        "state_dir": directory / "state",
        "trainer.max_steps": steps,
        "trainer.max_staleness": staleness,
        "evaluation.samples": 0,
        "checkpoint.every": 0,
    }
    train_in_process(load(setting_words(settings), {}), Console(quiet=True))
    return read_lines(directory / "metrics.jsonl")


def costs(lines: list[Any]) -> tuple[float, float]:
    """Returns the seconds and the processor seconds of a step, the median of a run."""
    seconds = [sum(line["seconds"].values()) for line in lines[_FIRST:]]
    cpu_seconds = [line["cpu_seconds"] for line in lines[_FIRST:]]
    return statistics.median(seconds), statistics.median(cpu_seconds)


def row(staleness: int, rounds: int, steps: int) -> list[str]:
    """Returns a row of the table."""
    plain: list[tuple[float, float]] = []
    exact: list[tuple[float, float]] = []
    sums: set[tuple[str, ...]] = set()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            for reproducible in (False, True):
                lines = lines_of(
                    Path(directory) / str(reproducible),
                    steps,
                    reproducible=reproducible,
                    staleness=staleness,
                )
                (exact if reproducible else plain).append(costs(lines))
                if reproducible:
                    sums.add(tuple(line["weights_checksum"] for line in lines))

    figures = [str(staleness)]
    for before, after in zip(zip(*plain, strict=True), zip(*exact, strict=True), strict=True):
        ratio = statistics.median(mine / other for mine, other in zip(after, before, strict=True))
        medians = (statistics.median(before), statistics.median(after))
        figures += [*(f"{median:.3f}" for median in medians), f"{ratio:.2f}"]
    return [*figures, "equal" if len(sums) == 1 else f"{len(sums)} kinds of runs"]


def main() -> None:
    parser = command_parser("benchmarks.reproducible", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    arguments = parser.parse_args()
    table = figures_table(
        f"seconds and processor seconds per step, without and with it: {arguments.rounds} rounds",
        ["staleness", "s", "with", "ratio", "CPU s", "with", "ratio", "weights"],
    )
    for staleness in (0, 1):
        table.add_row(*row(staleness, arguments.rounds, arguments.steps))
    Console().print(table)


if __name__ == "__main__":
    main()
