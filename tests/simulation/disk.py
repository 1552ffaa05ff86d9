"""Disks: what is left on them when a process ends at any moment, and when writes fail."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

_SETS_SYNC = "PRAGMA synchronous = "
_WRITES = ("INSERT", "REPLACE", "UPDATE", "DELETE", "COMMIT")


class Disk:
    """The files of a process.

    A power failure leaves what was written by then, without what SQLite did not sync. It may strike
    between any two statements: a statement calls `at_statement` first.
    """

    def __init__(self, root: Path, cut: Callable[[int], int]) -> None:
        self._root = root
        self._cut = cut
        self._lives = 0
        self._unsynced: set[str] = set()
        """Databases whose commits SQLite does not sync."""
        self.at_statement: Callable[[], None] = lambda: None
        self.problem: int | None = None
        """SQLite's code of the error that every statement which writes has now."""
        self._copies = 0
        self.path.mkdir(parents=True)

    @property
    def path(self) -> Path:
        """The directory of this life of the process."""
        return self._root / str(self._lives)

    def before(self, name: str, statement: str) -> None:
        """Sees a statement to the database `name` before it is executed. Raises the error of the
        disk.
        """
        if statement.startswith(_SETS_SYNC) and statement != f"{_SETS_SYNC}FULL":
            self._unsynced.add(name)
        self.at_statement()
        if self.problem is not None and statement.startswith(_WRITES):
            error = sqlite3.OperationalError("the disk refuses to write")
            error.sqlite_errorcode = self.problem
            raise error

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
        self.at_statement = lambda: None

    def restart_empty(self) -> None:
        """Begins another life of the process, on a new volume."""
        self._lives += 1
        self.path.mkdir()
        self.at_statement = lambda: None


_execute = sqlite3.Connection.execute


class _Connection(sqlite3.Connection):
    """A connection to a database on a disk."""

    before: Callable[[str], None] = staticmethod(lambda _: None)

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        self.before(statement)
        return _execute(self, statement, *parameters)

    def executemany(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        self.before(statement)
        return super().executemany(statement, *parameters)


@contextmanager
def watched(disk_of: Callable[[Path], Disk | None]) -> Iterator[None]:
    """Inside the block, connections to databases belong to the disk on which their files are. At its
    end they are closed: thousands of runs in one process would otherwise hold their files open.
    """
    connect = sqlite3.connect
    opened: list[sqlite3.Connection] = []

    def connected(path: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        disk = disk_of(Path(path))
        if disk is None:
            plain: sqlite3.Connection = connect(path, *arguments, **options)
            return plain
        connection: _Connection = connect(path, *arguments, factory=_Connection, **options)
        connection.before = partial(disk.before, str(Path(path).relative_to(disk.path)))
        opened.append(connection)
        return connection

    try:
        with patch.object(sqlite3, "connect", connected):
            yield
    finally:
        for connection in opened:
            connection.close()
