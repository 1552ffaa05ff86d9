"""The runs that a page shows: the named ones, and those below a named directory."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from common.errors import ConfigError
from trainer.dashboard.runs import RunReader

_LOOK_EVERY_S = 3.0
_DEPTH = 3
"""How many levels below a named directory are searched for runs."""
_FILES = ("config.json", "metrics.jsonl")


def is_run(directory: Path) -> bool:
    """Returns whether a run has written this directory."""
    return any((directory / name).is_file() for name in _FILES)


class RunList(Sequence[RunReader]):
    """Runs by index, which never changes; runs that start later are appended. Thread-safe.

    Raises ConfigError for a directory that neither is nor contains a run.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._runs: list[RunReader] = []
        self._roots = [directory for directory in directories if not is_run(directory)]
        for directory in directories:
            found = [(directory, "")] if is_run(directory) else list(_below(directory))
            if not found:
                message = "there is no such run directory"
                if directory.is_dir():
                    message = "this is not a run directory, and contains none"
                raise ConfigError(
                    message,
                    field="RUN_DIR",
                    value=str(directory),
                    remedy="name the directory of a run, such as runs/NAME (it has a config.json), "
                    "or one above several",
                )
            for path, name in found:
                self._add(path, name)

    def _add(self, directory: Path, name: str) -> None:
        if any(run.directory.resolve() == directory.resolve() for run in self._runs):
            return
        taken = {run.name for run in self._runs}
        name = name or directory.resolve().name
        if name in taken:
            name = "/".join(directory.resolve().parts[-2:])
        unique = name
        number = 1
        while unique in taken:
            number += 1
            unique = f"{name} ({number})"
        self._runs.append(RunReader(directory, name=unique))

    def _look(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
                return
            for root in self._roots:
                for directory, name in _below(root):
                    self._add(directory, name)
            self._looked_at = time.monotonic()

    def __len__(self) -> int:
        self._look()
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> RunReader: ...
    @overload
    def __getitem__(self, index: slice) -> list[RunReader]: ...
    def __getitem__(self, index: int | slice) -> RunReader | list[RunReader]:
        return self._runs[index]


def _below(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the run directories below `root`, each with its relative path; does not search inside
    a run.
    """
    for place, directories, files in os.walk(root):
        path = Path(place)
        depth = len(path.relative_to(root).parts)
        if depth and any(name in files for name in _FILES) and is_run(path):
            directories.clear()
            yield path, str(path.relative_to(root))
        elif depth >= _DEPTH:
            directories.clear()
        else:
            directories[:] = sorted(name for name in directories if not name.startswith("."))
