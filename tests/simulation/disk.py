"""Disks: what is left on them when a process ends at any moment, and when they are full."""

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_SETS_SYNC = re.compile(r"PRAGMA synchronous = (\w+)")


class Disk:
    """The files of a process.

    A power failure leaves what was written by then, without what SQLite did not sync. It may strike
    between any two statements: a statement asks `at_statement` first.
    """

    def __init__(self, root: Path, cut: Callable[[int], int]) -> None:
        self._root = root
        self._cut = cut
        self._lives = 0
        self._unsynced: set[str] = set()
        """Databases whose commits SQLite does not sync."""
        self._connections: list[sqlite3.Connection] = []
        self.at_statement: Callable[[], None] = lambda: None
        self._copies = 0
        self.path.mkdir(parents=True)

    @property
    def path(self) -> Path:
        """The directory of this life of the process."""
        return self._root / str(self._lives)

    def connected(self, name: str, connection: sqlite3.Connection) -> None:
        """Watches a connection to the database `name`."""
        self._connections.append(connection)

        def seen(statement: str) -> None:
            found = _SETS_SYNC.search(statement)
            if found and found[1] != "FULL":
                self._unsynced.add(name)
            self.at_statement()

        connection.set_trace_callback(seen)

    def fail(self) -> None:
        """Ends the process's life: what it still writes goes where nobody reads it."""
        self.restart_from(self.path)
        for name in self._unsynced:
            log = self.path / f"{name}-wal"
            if log.exists():
                with log.open("r+b") as file:
                    file.truncate(self._cut(log.stat().st_size))

    def snapshot(self) -> Path:
        """Copies the volume, as an operator would while the service runs."""
        self._copies += 1
        copy = self._root / f"copy-{self._copies}"
        shutil.copytree(self.path, copy)
        return copy

    def restart_from(self, source: Path) -> None:
        """Begins another life of the process, whose files are those of `source`."""
        self._lives += 1
        shutil.copytree(source, self.path)
        self._connections = []
        self.at_statement = lambda: None

    def fill(self, is_full: bool) -> None:
        """Fills the disk, or frees it: a full one takes no further page."""
        for connection in self._connections:
            limit = 0x7FFFFFFE
            if is_full:
                (limit,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {limit}")


@contextmanager
def watched(disk_of: Callable[[Path], Disk | None]) -> Iterator[None]:
    """Inside the block, connections to databases belong to the disk on which their files are."""
    connect = sqlite3.connect

    def connected(path: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(path, *arguments, **options)
        disk = disk_of(Path(path))
        if disk is not None:
            disk.connected(str(Path(path).relative_to(disk.path)), connection)
        return connection

    with patch.object(sqlite3, "connect", connected):
        yield
