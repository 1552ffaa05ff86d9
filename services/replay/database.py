"""The SQLite file of the replay buffer: its layout, how it is opened, and transactions that are on
disk when they end.

SQLite reads its log up to the first damaged page and silently drops the rest. So a separate file,
`replay.db.count`, records how many changes and groups were acknowledged. A store that has fewer is
not opened.

SQLite has no checksum of its pages. So every row that decides what is trained on has a checksum of
its fields (`seal`), computed when it is written and compared when it is read; the file's own
structure is checked when it is opened.
"""

import contextlib
import json
import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError, ServiceError
from common.process.storage import (
    OpenedFile,
    StorageFailed,
    has_declarations,
    is_damage,
    sqlite_damage,
    sqlite_remedy,
    sum_of,
)
from common.wire.store_mark import StoreMark

log = logging.getLogger(__name__)
COUNTERS = ("added", "duplicates", "evicted", "removed", "dropped")
"""Groups since the file was created: stored; added again; too old when taken; removed for space;
dropped by reset_fresh."""
_CHANGES = "changes"
"""Name of the counter of transactions that changed something."""
_IDENTITY = "identity"
"""Name of the random number that tells this store from others."""
MAX_PRIORITY = "max_priority"
_DAMAGED = "the replay store is damaged: "
_REMEDY = "restore the file from a copy, or move it away to start empty"
_COUNT_BYTES = 128
"""Fixed size of the count file, so that overwriting it needs no space on a full disk."""
_LAYOUT = 4
_WAL_PAGES = 8192

_SCHEMA = """
CREATE TABLE groups (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    prompt_id TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'fresh' CHECK (state IN ('fresh', 'leased', 'consumed')),
    version INTEGER NOT NULL,
    position INTEGER NOT NULL,
    completions INTEGER NOT NULL,
    rewards BLOB NOT NULL,
    reward_sum REAL NOT NULL,
    positive INTEGER NOT NULL,
    correct INTEGER NOT NULL,
    created REAL NOT NULL,
    request_id TEXT,
    lease_until REAL,
    priority REAL,
    times_sampled INTEGER NOT NULL DEFAULT 0,
    data_sum INTEGER NOT NULL,
    seal INTEGER NOT NULL
);
CREATE INDEX by_turn ON groups (state, version, position, id);
CREATE INDEX by_lease ON groups (request_id, lease_until) WHERE request_id IS NOT NULL;
CREATE TABLE blobs (
    key INTEGER PRIMARY KEY REFERENCES groups (key) ON DELETE CASCADE,
    data BLOB NOT NULL
);
CREATE TABLE experiences (
    key INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL,
    response TEXT NOT NULL,
    reward REAL NOT NULL,
    ground_truth TEXT,
    seal INTEGER NOT NULL
);
CREATE TABLE answers (
    key INTEGER PRIMARY KEY,
    call TEXT NOT NULL,
    request TEXT NOT NULL,
    answer TEXT NOT NULL,
    seal INTEGER NOT NULL,
    UNIQUE (call, request)
);
CREATE INDEX by_call ON answers (call, key);
CREATE TABLE runs (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE);
CREATE TABLE gone (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE);
CREATE TABLE counters (name TEXT PRIMARY KEY, value NOT NULL, seal INTEGER NOT NULL);
CREATE TABLE totals (state TEXT PRIMARY KEY, groups INTEGER NOT NULL, completions INTEGER NOT NULL);
INSERT INTO totals VALUES ('fresh', 0, 0), ('leased', 0, 0), ('consumed', 0, 0), ('lone', 0, 0);
CREATE TRIGGER group_in AFTER INSERT ON groups BEGIN
    UPDATE totals SET groups = groups + 1, completions = completions + NEW.completions
        WHERE state = NEW.state;
END;
CREATE TRIGGER group_out AFTER DELETE ON groups BEGIN
    UPDATE totals SET groups = groups - 1, completions = completions - OLD.completions
        WHERE state = OLD.state;
END;
CREATE TRIGGER group_moved AFTER UPDATE OF state ON groups BEGIN
    UPDATE totals SET groups = groups - 1, completions = completions - OLD.completions
        WHERE state = OLD.state;
    UPDATE totals SET groups = groups + 1, completions = completions + NEW.completions
        WHERE state = NEW.state;
END;
CREATE TRIGGER lone_in AFTER INSERT ON experiences BEGIN
    UPDATE totals SET completions = completions + 1 WHERE state = 'lone';
END;
CREATE TRIGGER lone_out AFTER DELETE ON experiences BEGIN
    UPDATE totals SET completions = completions - 1 WHERE state = 'lone';
END;
"""


class Full(ServiceError):
    """Groups waiting for training fill the buffer; nothing was stored (503: the client retries)."""

    status = 503
    code = "full"


class Database:
    """The file. One process may open it, and one thread may use it at a time.

    Raises ConfigError when the file is damaged, has another layout, is in use, or cannot be
    created.
    """

    committed: dict[str, tuple[int, int]]
    """`totals()` after the last transaction; any thread may read it."""
    mark: StoreMark
    """After the last transaction; any thread may read it."""
    _count_file: int | None = None
    """Descriptor of the count file."""
    _kept_counts = b""
    """What it should have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                self._create()
                # It belongs to a store that was moved away.
                self._count_path.unlink(missing_ok=True)
            self.db = _connect(path)
            self._opened = OpenedFile(path)
            try:
                self._check()
                self.committed = self.totals()
                self.mark = self._read_mark()
                self._compare_counts()
            except BaseException:
                self.db.close()
                raise
        except StorageFailed as error:
            raise self._unusable(error.message.removeprefix(_DAMAGED)) from None
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise self._unusable(str(error)) from None

    def _create(self) -> None:
        """Creates the file under a temporary name and renames it, so that it is never
        incomplete.
        """
        log = self.path.with_name(f"{self.path.name}-wal")
        if log.exists():
            raise self._unusable(f"the file is gone but its log {log.name} is there")
        unnamed = self.path.with_name(f"{self.path.name}.new")
        unnamed.unlink(missing_ok=True)
        db = _connect(unnamed)
        try:
            db.executescript(_SCHEMA)
            counters = [*((name, 0) for name in (*COUNTERS, _CHANGES)), (MAX_PRIORITY, 1.0)]
            counters.append((_IDENTITY, secrets.randbits(52)))
            sealed = [(*counter, sum_of(counter)) for counter in counters]
            db.executemany("INSERT INTO counters VALUES (?, ?, ?)", sealed)
            db.execute(f"PRAGMA user_version = {_LAYOUT}")
        finally:
            db.close()
        unnamed.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _check(self) -> None:
        problem = sqlite_damage(self.db, "integrity_check")
        if problem:
            raise self._unusable(problem)
        layout = self.db.execute("PRAGMA user_version").fetchone()[0]
        if layout != _LAYOUT:
            raise self._unusable(f"its layout is {layout}, this program reads {_LAYOUT}")
        if not has_declarations(self.db, _SCHEMA):
            raise self._unusable("the declarations of its tables are damaged")
        if self.totals() != self._counted():
            raise self._unusable("its totals differ from what it stores")

    def _counted(self) -> dict[str, tuple[int, int]]:
        """Returns what `totals` must be, counted in the tables."""
        counted = {"fresh": (0, 0), "leased": (0, 0), "consumed": (0, 0)}
        query = "SELECT state, COUNT(*), SUM(completions) FROM groups GROUP BY state"
        for state, groups, completions in self.db.execute(query):
            counted[state] = groups, completions
        (lone,) = self.db.execute("SELECT COUNT(*) FROM experiences").fetchone()
        return counted | {"lone": (0, lone)}

    def _unusable(self, why: str) -> ConfigError:
        remedy = sqlite_remedy(why, _REMEDY)
        trouble = {
            "end the other process": "is in use by another process",
            "free disk space": "cannot be made",
        }
        return ConfigError(
            f"the replay store {trouble.get(remedy, 'cannot be read')}: {why}",
            field="state_dir",
            value=str(self.path),
            remedy=remedy,
        )

    @property
    def _count_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.count")

    def _compare_counts(self) -> None:
        """Raises ConfigError when the store has fewer changes than were acknowledged; else starts
        counting them.
        """
        try:
            text = self._count_path.read_text() if self._count_path.exists() else "{}"
            kept = json.loads(text)
            added = int(kept.get("added", 0))
            changes = int(kept.get(_CHANGES, 0))
        except (ValueError, AttributeError, TypeError):
            raise self._unusable(
                f"{self._count_path.name} is damaged; without that file nothing is compared"
            ) from None
        lost = changes - self.mark.changes
        if lost > 0:
            groups = added - int(self.counter("added"))
            with contextlib.suppress(OSError):  # keep the log, which closing the store removes
                wal = self.path.with_name(f"{self.path.name}-wal")
                wal.with_suffix(".db-wal-damaged").hardlink_to(wal)
            raise self._unusable(
                f"the last {lost} of {changes} acknowledged changes are gone, with {groups} of "
                f"{added} groups: its log was damaged or cut, or the file is an older copy; "
                f"remove {self._count_path.name} to go on without them"
            )
        with contextlib.suppress(OSError):  # on a full disk the store can still be read
            self._count_file = os.open(self._count_path, os.O_RDWR | os.O_CREAT, 0o644)
        self._keep_counts()

    def _keep_counts(self) -> None:
        """Records the acknowledged counts, unsynced: after a power failure they may be too low,
        never too high.
        """
        if self._count_file is None:
            return
        text = json.dumps({_CHANGES: self.mark.changes, "added": int(self.counter("added"))})
        assert len(text) <= _COUNT_BYTES
        content = text.encode().ljust(_COUNT_BYTES)
        try:
            os.pwrite(self._count_file, content, 0)
            self._kept_counts = content
        except OSError as error:
            log.warning(
                "%s cannot be written, a loss in the log would not be noticed: %s",
                self._count_path,
                error,
            )

    def _check_place(self) -> None:
        """Raises StorageFailed when another program has replaced the store under this process,
        whose changes would be lost when it ends.
        """
        is_set_back = (
            self._count_file is not None
            and os.pread(self._count_file, _COUNT_BYTES, 0) != self._kept_counts
        )
        if is_set_back or self._opened.is_replaced():
            raise StorageFailed(
                "the replay store was removed, replaced or set back while this service had it open",
                field="state_dir",
                value=str(self.path),
                remedy="stop the run, put the directory into the state that is wanted, and start "
                "the run again: it resumes from its checkpoint",
                code="replaced",
            )

    def _read_mark(self) -> StoreMark:
        return StoreMark(int(self.counter(_IDENTITY)), int(self.counter(_CHANGES)))

    def read_mark(self) -> StoreMark:
        """Returns the mark, which only this process changes."""
        return self.mark

    def close(self) -> None:
        if self._count_file is not None:
            os.close(self._count_file)
            self._count_file = None
        self.db.close()

    def checkpoint(self) -> None:
        """Moves all changes from the write-ahead log into the file."""
        with self.errors():
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def size(self) -> int:
        """Returns the size on disk in bytes, log included; any thread may call it."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns SQLite errors into StorageFailed."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            if is_damage(error):
                raise self.damaged(str(error)) from error
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            kind = getattr(error, "sqlite_errorname", type(error).__name__)
            raise StorageFailed(
                f"the replay store could not be used, nothing was changed: {error} ({kind})",
                field="state_dir",
                value=str(self.path),
                remedy="free disk space or lower replay.capacity"
                if full
                else "check the disk and the log of this service",
                code="disk_full" if full else None,
                status=507 if full else None,
            ) from error

    def damaged(self, what: str) -> StorageFailed:
        """Returns the error for stored data that is not what was written."""
        return StorageFailed(
            f"{_DAMAGED}{what}",
            field="state_dir",
            value=str(self.path),
            remedy=f"check the disk; {_REMEDY}",
            code="damaged",
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Runs a transaction, which is on disk when it ends. Raises StorageFailed and then changes
        nothing.
        """
        with self.errors():
            self._check_place()
            try:
                before = self.db.total_changes
                self.db.execute("BEGIN IMMEDIATE")
                yield
                changed = self.db.total_changes != before
                if changed:
                    self.count(_CHANGES, 1)
                self.db.execute("COMMIT")
                self.committed = self.totals()
                if changed:
                    self.mark = self._read_mark()
                    self._keep_counts()
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def counter(self, name: str) -> float:
        query = "SELECT value, seal FROM counters WHERE name = ?"
        value, seal = self.db.execute(query, (name,)).fetchone() or (0, None)
        if seal != sum_of((name, value)):
            raise self.damaged(f"the checksum of the counter {name} does not match")
        return float(value)

    def count(self, name: str, more: int) -> None:
        """Adds to a counter, within the caller's transaction."""
        self.set_counter(name, int(self.counter(name)) + more)

    def set_counter(self, name: str, value: float) -> None:
        """Sets a counter, within the caller's transaction."""
        query = "UPDATE counters SET value = ?, seal = ? WHERE name = ?"
        self.db.execute(query, (value, sum_of((name, value)), name))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Returns (groups, completions) by state; `lone` experiences count as completions without a
        group.
        """
        rows = self.db.execute("SELECT state, groups, completions FROM totals")
        return {state: (groups, completions) for state, groups, completions in rows}


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
    try:
        # Leases and totals are only right when nobody else writes.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        db.execute("PRAGMA cache_size = -65536")
    except BaseException:
        db.close()
        raise
    return db
