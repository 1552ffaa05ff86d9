"""The runs that a page shows: the named ones, and those below a named directory."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.errors import NotFound
from trainer.dashboard.runs import RunReader
from trainer.observe.run_dir import is_run, no_run

_LOOK_EVERY_S = 3.0
# How many levels below a named directory are searched for runs.
_DEPTH = 3


Runs = Callable[[], list[RunReader]]
"""Returns the runs of a page by index."""


def run_at(runs: Runs, index: int) -> RunReader:
    """Returns one of the runs. Raises NotFound."""
    found = runs()
    if index >= len(found):
        raise NotFound(
            "there is no such run", field="run", value=index, remedy=f"use 0 to {len(found) - 1}"
        )
    return found[index]


class RunList:
    """The runs in these directories, or below them. Thread-safe.

    Raises ConfigError for a directory that neither is nor contains a run.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._lock = threading.Lock()
        self._directories = directories
        self._looked_at = 0.0
        self._runs: list[RunReader] = []
        for directory in directories:
            if not any(_runs_in(directory)):
                raise no_run(directory, ", and contains none")

    def __call__(self) -> list[RunReader]:
        """Returns the runs; their order never changes, and runs that start later are appended."""
        with self._lock:
            if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
                for root in self._directories:
                    for path in _runs_in(root):
                        self._add(root, path)
                self._looked_at = time.monotonic()
            return self._runs

    def _add(self, root: Path, path: Path) -> None:
        if any(run.directory.resolve() == path.resolve() for run in self._runs):
            return
        name = path.resolve().name if path == root else str(path.relative_to(root))
        if name in {run.name for run in self._runs}:
            name = str(path.resolve())
        self._runs.append(RunReader(path, name=name))


def _runs_in(root: Path) -> Iterator[Path]:
    """Yields the run directories at and below `root`; does not search inside a run."""
    for place, directories, _ in os.walk(root):
        path = Path(place)
        depth = len(path.relative_to(root).parts)
        if is_run(path):
            yield path
            directories.clear()
        elif depth >= _DEPTH:
            directories.clear()
        else:
            directories[:] = sorted(name for name in directories if not name.startswith("."))
