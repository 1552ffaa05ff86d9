"""Disk errors by name: a full or broken disk, a directory that is not writable, a damaged SQLite
file.
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import xxhash

from common.errors import ConfigError, ServiceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEVER = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
)


class StorageFailed(ServiceError):
    """The disk is full (507) or broken (500); data stored before is unchanged."""

    status = 500
    code = "storage_failed"


def sum_of(content: object) -> int:
    """Returns a checksum of 63 bits, for an integer column. Values other than bytes are compared by
    their `repr`, which tells apart all that SQLite returns.
    """
    data = content if isinstance(content, bytes) else repr(content).encode()
    return xxhash.xxh3_64_intdigest(data) >> 1


@contextmanager
def storing(what: str, path: Path, field: str, remedy: str = "try again") -> Iterator[None]:
    """Turns disk errors while `what` is written to `path` into StorageFailed, including errors
    wrapped by libraries.

    `field` is the setting of the path; `remedy` follows on "free disk space there, then".
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        full = number in _FULL or "No space left on device" in str(error)
        if isinstance(error, ServiceError) or not (full or isinstance(error, OSError)):
            raise
        raise StorageFailed(
            f"{what} cannot be written: {error}".splitlines()[0],
            field=field,
            value=str(path),
            remedy=f"free disk space there, then {remedy}"
            if full
            else f"check that disk, then {remedy}",
            code="disk_full" if full else None,
            status=507 if full else None,
        ) from error


def make_directory(path: Path, field: str) -> None:
    """Makes a writable directory. Raises ConfigError naming `field` when that is impossible, except
    on a full disk.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in _NEVER:
            problem = f"the directory is not writable: {error.strerror}"
            raise ConfigError(
                problem, field=field, value=str(path), remedy="name another directory"
            ) from None


def sqlite_damage(db: sqlite3.Connection, check: Literal["quick_check", "integrity_check"]) -> str:
    """Returns the first problem that SQLite finds in the file; empty when there is none."""
    problem: str = db.execute(f"PRAGMA {check}(1)").fetchone()[0]
    # A line `*** in database main ***` may precede it, which looks like a redacted secret.
    return "" if problem == "ok" else problem.splitlines()[-1]


class Damaged(sqlite3.DatabaseError):
    """A row differs from its checksum."""


def is_damage(error: Exception) -> bool:
    """Whether SQLite or a checksum refuses what is in the file."""
    if isinstance(error, Damaged | UnicodeError):  # names of tables are UTF-8
        return True
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "decode to UTF-8" in str(error)


def has_declarations(db: sqlite3.Connection, schema: str) -> bool:
    """Whether the tables, indexes and triggers of a file are those that `schema` makes."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"
    with closing(sqlite3.connect(":memory:")) as expected:
        expected.executescript(schema)
        return db.execute(query).fetchall() == expected.execute(query).fetchall()


class OpenedFile:
    """A file that this process has open, to notice that another one has taken its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = self._look()

    def is_replaced(self) -> bool:
        """Whether the file was removed, or another one has its name."""
        return self._look() != self._identity

    def _look(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


def sqlite_remedy(why: str, damaged: str) -> str:
    """Returns the remedy for SQLite's error `why`: `damaged`, unless it is about locks, disk space
    or permissions.
    """
    if "locked" in why:
        return "end the other process"
    if "full" in why or "No space" in why:
        return "free disk space"
    if "readonly" in why or "unable to open" in why:
        return "let this user write to the file and its directory, or set another state_dir"
    return damaged
