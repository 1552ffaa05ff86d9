"""Parts that the benchmarks share: the command line, settings in words, tables, and timing."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

from rich.table import Table

from common.process.cli import CommandParser


def command_parser(module: str, documentation: str | None) -> CommandParser:
    """Returns the parser of `python -m MODULE`: its documentation is the help."""
    summary, _, details = (documentation or "").partition("\n\n")
    return CommandParser(module, summary, epilog=details)


def setting_words(settings: Mapping[str, object]) -> list[str]:
    """Returns settings as arguments: `{"trainer.max_steps": 3}` is `--trainer.max_steps 3`."""
    words = []
    for name, value in settings.items():
        words += [f"--{name}", str(value)]
    return words


def figures_table(title: str, headers: Iterable[str], *, text_columns: int = 1) -> Table:
    """Returns a table of figures, aligned to the right; the first columns are text."""
    table = Table(title=title)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number < text_columns else "right")
    return table


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    return statistics.median(seconds_of(call) for _ in range(rounds))
