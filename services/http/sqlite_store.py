"""A SQLite file that notices when it is damaged, replaced or set back: the base of the replay store
and of the stream of prompts.

SQLite has no checksum of its pages. So every row that matters ends with a checksum of its other
fields (`sealed`), which is compared when the row is read (`unsealed`). The structure of the file is
checked when it is opened. Every transaction that changes something is counted (`StoreMark`).
"""

import errno
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from common import Json
from common.errors import ConfigError
from common.process.storage import StorageFailed
from common.wire.headers import StoreMark

TABLES = """
CREATE TABLE life (identity INTEGER NOT NULL, changes INTEGER NOT NULL, seal INTEGER NOT NULL)
    STRICT;
CREATE TABLE answers (
    key INTEGER PRIMARY KEY,
    call TEXT NOT NULL,
    request TEXT NOT NULL,
    answer TEXT NOT NULL,
    seal INTEGER NOT NULL,
    UNIQUE (call, request)
) STRICT;
CREATE INDEX by_call ON answers (call, key);
CREATE TABLE runs (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE);
"""
"""The store's mark, in one row, what is remembered of requests, and the runs that have begun."""
REMEMBERED_REQUESTS = 10_000
"""Answers to each call that are kept, for retries and for copies that arrive late."""
_FORGET_EVERY = 100
_DECLARATIONS = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"
_STATUSES = {sqlite3.SQLITE_FULL: 507, sqlite3.SQLITE_BUSY: 503}
"""Errors after which the client tries again."""


@cache
def _declarations(schema: str) -> list[tuple[str, ...]]:
    """Returns what a file with this schema answers to `_DECLARATIONS`."""
    with closing(sqlite3.connect(":memory:")) as db:
        return db.executescript(schema).execute(_DECLARATIONS).fetchall()


def sum_of(content: object) -> int:
    """Returns a checksum of 63 bits, for an integer column. Values other than bytes are compared by
    their `repr`, which tells apart all that SQLite returns.
    """
    data = content if isinstance(content, bytes) else repr(content).encode()
    return xxhash.xxh3_64_intdigest(data) >> 1


def sealed(fields: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a row: the fields and their checksum."""
    return *fields, sum_of(tuple(fields))


def unsealed(row: Sequence[Any] | None, what: str) -> tuple[Any, ...]:
    """Returns the fields of a row, which `what` names. Raises Damaged when there is no row, or its
    checksum is another one.
    """
    *fields, seal = row or (None,)
    if seal != sum_of(tuple(fields)):
        raise Damaged(f"{what} differs from its checksum")
    return tuple(fields)


class Damaged(sqlite3.DatabaseError):
    """What the file has is not what was written."""


class SqliteStore:
    """The file. Thread-safe in its transactions.

    Args:
        path: the file; it and its directory are made when they are absent.
        schema: the declarations of its tables, those of `TABLES` among them.

    Raises:
        ConfigError: the file is damaged, has another layout, is in use, or cannot be made.
    """

    name: ClassVar[str]
    """What the file is, for errors."""
    layout: ClassVar[int]
    """Version of the schema."""
    restore: ClassVar[str]
    """What to do with a damaged file."""
    pragmas: ClassVar[tuple[str, ...]] = ()
    """Further settings of a connection."""
    busy_s: ClassVar[float] = 30
    """How long a call waits for other processes."""
    mark: StoreMark
    """After the last transaction of this process; any thread may read it."""

    def __init__(self, path: Path, schema: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            with self.errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    self._create(schema)
                # Transactions are explicit; `_lock` makes one connection safe for all threads.
                self.db = sqlite3.connect(
                    path, isolation_level=None, check_same_thread=False, timeout=self.busy_s
                )
                try:
                    self._configure()
                    self._file = self._identity()
                    self._check(schema)
                    self.mark = self._stored_mark()
                    self.check_content()
                except BaseException:
                    self.db.close()
                    raise
        except StorageFailed as error:
            raise ConfigError(
                error.message,
                field=error.field,
                value=error.value,
                remedy=error.remedy,
                code=error.code,
            ) from None

    def fill(self, db: sqlite3.Connection) -> None:
        """Stores what a new file begins with."""

    def check_content(self) -> None:
        """Raises Damaged when what an existing file has cannot be right."""

    def is_set_back(self) -> bool:
        """Whether another program has replaced the file under this process."""
        return self._identity() != self._file

    @property
    def wal_path(self) -> Path:
        """The write-ahead log, which has the latest changes."""
        return self.path.with_name(f"{self.path.name}-wal")

    # ------------------------------------------------------------ opening

    def _create(self, schema: str) -> None:
        """Makes the file under a temporary name and renames it, so that it is never incomplete."""
        if self.wal_path.exists():
            raise Damaged(f"the file is gone but its log {self.wal_path.name} is there")
        unnamed = self.path.with_name(f"{self.path.name}.new")
        unnamed.unlink(missing_ok=True)
        with closing(sqlite3.connect(unnamed, isolation_level=None)) as db:
            # No log, as nobody reads the file before it is whole; one transaction, as each
            # declaration alone would be synced.
            db.executescript(
                f"PRAGMA journal_mode = OFF; BEGIN; PRAGMA user_version = {self.layout}; {schema}"
            )
            db.execute("INSERT INTO life VALUES (?, ?, ?)", sealed((secrets.randbits(52), 0)))
            self.fill(db)
            db.execute("COMMIT")
        unnamed.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _configure(self) -> None:
        # `journal_mode` last: it opens the file, in the locking mode that `pragmas` may set.
        for pragma in (*self.pragmas, "synchronous = FULL", "journal_mode = WAL"):
            self.db.execute(f"PRAGMA {pragma}")

    def _check(self, schema: str) -> None:
        """Raises Damaged unless the file's structure is whole and is that of `schema`."""
        problem: str = self.db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if problem != "ok":
            # A line `*** in database main ***` may precede it, which looks like a redacted secret.
            raise Damaged(problem.splitlines()[-1])
        layout = self.db.execute("PRAGMA user_version").fetchone()[0]
        if layout != self.layout:
            raise Damaged(f"its layout is {layout}, this program reads {self.layout}")
        if self.db.execute(_DECLARATIONS).fetchall() != _declarations(schema):
            raise Damaged("the declarations of its tables are damaged")

    def _identity(self) -> tuple[int, int] | None:
        """Returns what tells the file from another one with its name; None without a file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    # ------------------------------------------------------------ using it

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs a transaction, which is on disk when it ends. Raises StorageFailed and then changes
        nothing.
        """
        with self._lock, self.errors():
            if self.is_set_back():
                raise self._error(
                    "was removed, replaced or set back while this service had it open",
                    "stop the run, put the directory into the state that is wanted, and start the "
                    "run again: it resumes from its checkpoint",
                    code="replaced",
                )
            self.db.execute("BEGIN IMMEDIATE")
            try:
                before = self.db.total_changes
                yield self.db
                mark = self._stored_mark()
                if self.db.total_changes != before:
                    mark = StoreMark(mark.identity, mark.changes + 1)
                    self.db.execute(
                        "UPDATE life SET identity = ?, changes = ?, seal = ?", sealed(mark)
                    )
                self.db.execute("COMMIT")
                self.mark = mark
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def _stored_mark(self) -> StoreMark:
        row = self.db.execute("SELECT identity, changes, seal FROM life").fetchone()
        return StoreMark(*unsealed(row, "the count of changes"))

    def read_mark(self) -> StoreMark:
        """Returns the mark now, with the changes of other processes."""
        with self.transaction():
            pass
        return self.mark

    def runs(self) -> list[str]:
        """Returns the runs that have begun, the current one last."""
        with self.errors():
            return [run for (run,) in self.db.execute("SELECT id FROM runs ORDER BY key")]

    def begin_run(self, run_id: str) -> None:
        """Stores that a run begins, within the caller's transaction. A caller without an id has no
        run.
        """
        if run_id:
            self.db.execute("INSERT INTO runs (id) VALUES (?)", (run_id,))

    def answer_to(self, call: str, request_id: str) -> Json:
        """Returns what is remembered of a request; empty when it is new."""
        query = "SELECT call, request, answer, seal FROM answers WHERE call = ? AND request = ?"
        with self.errors():
            row = self.db.execute(query, (call, request_id)).fetchone()
            if row is None:
                return {}
            *_, text = unsealed(row, f"the answer to {call} {request_id}")
        answer: Json = json.loads(text)
        return answer

    def remember(self, call: str, request_id: str, answer: Json) -> None:
        """Stores the answer to a request, within the caller's transaction."""
        [(key,)] = self.db.execute(
            "INSERT INTO answers (call, request, answer, seal) VALUES (?, ?, ?, ?) ON CONFLICT DO "
            "UPDATE SET answer = excluded.answer, seal = excluded.seal RETURNING key",
            sealed((call, request_id, json.dumps(answer))),
        ).fetchall()
        if key % _FORGET_EVERY == 0:
            self.db.execute(
                "DELETE FROM answers WHERE call = :call AND key <= (SELECT key FROM answers WHERE "
                "call = :call ORDER BY key DESC LIMIT 1 OFFSET :kept)",
                {"call": call, "kept": REMEMBERED_REQUESTS},
            )

    def flush(self) -> None:
        """Moves the write-ahead log into the file. Every answer is durable without it."""
        with self._lock, self.errors():
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self.db.close()

    # ------------------------------------------------------------ errors

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of SQLite and of the disk into StorageFailed."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError) as error:
            if _is_damage(error):
                remedy = f"check the disk; {self.restore}"
                raise self._error(f"is damaged: {error}", remedy, code="damaged") from error
            number = getattr(error, "sqlite_errorcode", 0)
            raise self._error(
                f"cannot be used, and nothing was changed: {error}",
                _remedy(error),
                code="disk_full" if number == sqlite3.SQLITE_FULL else None,
                status=_STATUSES.get(number),
            ) from error

    def _error(
        self, what: str, remedy: str, *, code: str | None, status: int | None = None
    ) -> StorageFailed:
        return StorageFailed(
            f"{self.name} {what}",
            field="state_dir",
            value=str(self.path),
            remedy=remedy,
            code=code,
            status=status,
        )


def _is_damage(error: Exception) -> bool:
    """Whether SQLite or a checksum refuses what is in the file."""
    if isinstance(error, Damaged | UnicodeError):  # names of tables are UTF-8
        return True
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "decode to UTF-8" in str(error)


def _remedy(error: Exception) -> str:
    """Returns the remedy for an error of SQLite or of the disk that is no damage."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "end the other process that uses it"
    if name == "SQLITE_FULL" or getattr(error, "errno", None) == errno.ENOSPC:
        return "free disk space"
    if isinstance(error, OSError) or name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return "let this user write to the file and its directory, or set another state_dir"
    return "check the disk and the log of this service"
