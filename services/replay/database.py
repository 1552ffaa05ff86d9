"""The SQLite file of the replay buffer: its layout, how it is opened, transactions that are on disk
when they end, and queries.

SQLite reads its log up to the first damaged page and silently drops the rest. So a separate file,
`replay.db.count`, records how many changes and groups were acknowledged. A store that has fewer is
not opened.
"""

import contextlib
import json
import logging
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from common import Json
from common.errors import NotFound, ServiceError
from common.wire.headers import StoreMark
from services.http.sqlite_store import TABLES, Damaged, SqliteStore, sealed, sum_of, unsealed

log = logging.getLogger(__name__)
COUNTERS = ("added", "duplicates", "evicted", "removed", "dropped")
"""Groups since the file was created: stored; added again; too old when taken; removed for space;
dropped by reset_fresh."""
MAX_PRIORITY = "max_priority"
_COUNT_BYTES = 128
"""Fixed size of the count file, so that overwriting it needs no space on a full disk."""

_FLOAT32 = struct.Struct("<f")
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


class GroupRecord(NamedTuple):
    """The fields of a group that queries need, and where the group is in its life."""

    id: str
    prompt_id: str
    version: int
    position: int
    completions: int
    rewards: bytes
    """float32 of each completion, for sampling by reward."""
    reward_sum: float
    positive: int
    """Completions with a reward above zero."""
    correct: int
    """Completions with a correct answer; -1 when unknown."""
    created: float
    data_sum: int
    """Checksum of the group as msgpack."""
    state: str = "fresh"
    request_id: str | None = None
    lease_until: float | None = None
    priority: float | None = None
    times_sampled: int = 0


COLUMNS = ", ".join(GroupRecord._fields)
_LISTED = (
    "id", "prompt_id", "state", "version", "position", "completions", "priority", "times_sampled",
    "created",
)  # fmt: skip
EXPERIENCE = ("prompt", "response", "reward", "ground_truth")


class Full(ServiceError):
    """Groups waiting for training fill the buffer; nothing was stored (503: the client retries)."""

    status = 503
    code = "full"


class Database(SqliteStore):
    """The file. One process may open it, and one thread may use it at a time.

    Raises ConfigError when the file is damaged, has another layout, is in use, or cannot be
    created.
    """

    name = "the replay store"
    layout = 5
    restore = "restore the file from a copy, or move it away to start empty"
    pragmas = (
        # Leases and totals are only right when nobody else writes.
        "locking_mode = EXCLUSIVE",
        "foreign_keys = ON",
        "wal_autocheckpoint = 8192",
        "cache_size = -65536",
    )
    busy_s = 5

    committed: dict[str, tuple[int, int]]
    """`totals()` after the last transaction; any thread may read it."""
    _kept: StoreMark | None = None
    """The moment of these totals and counts."""
    _count_file: int | None = None
    """Descriptor of the count file."""
    _kept_counts = b""
    """What it should have."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, TABLES + _SCHEMA)

    def fill(self, db: sqlite3.Connection) -> None:
        """Sets the counters to their first values."""
        # It belongs to a store that was moved away.
        self._count_path.unlink(missing_ok=True)
        counters = [*((name, 0) for name in COUNTERS), (MAX_PRIORITY, 1.0)]
        db.executemany("INSERT INTO counters VALUES (?, ?, ?)", map(sealed, counters))

    def check_content(self) -> None:
        """Raises Damaged when the totals differ from what is stored, acknowledged changes are gone,
        or a record is not what was written.
        """
        self.committed = self.totals()
        counted = {"fresh": (0, 0), "leased": (0, 0), "consumed": (0, 0)}
        query = "SELECT state, COUNT(*), SUM(completions) FROM groups GROUP BY state"
        for state, groups, completions in self.db.execute(query):
            counted[state] = groups, completions
        (lone,) = self.db.execute("SELECT COUNT(*) FROM experiences").fetchone()
        if self.committed != counted | {"lone": (0, lone)}:
            raise Damaged("its totals differ from what it stores")
        self._compare_counts()
        # Reading every record compares it with its checksum.
        following = "WHERE key > ? ORDER BY key LIMIT 10000"
        found = self.records(following, 0)
        while found:
            found = self.records(following, found[-1][0])

    @property
    def _count_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.count")

    def _compare_counts(self) -> None:
        """Raises Damaged when the store has fewer changes than were acknowledged; else starts
        counting them.
        """
        try:
            text = self._count_path.read_text() if self._count_path.exists() else "{}"
            kept = json.loads(text)
            added = int(kept.get("added", 0))
            changes = int(kept.get("changes", 0))
        except (ValueError, AttributeError, TypeError):
            raise Damaged(
                f"{self._count_path.name} is damaged; remove it to go on without a check that no "
                "acknowledged change is lost"
            ) from None
        lost = changes - self.mark.changes
        if lost > 0:
            groups = added - int(self.counter("added"))
            with contextlib.suppress(OSError):  # keep the log, which closing the store removes
                self.wal_path.with_suffix(".db-wal-damaged").hardlink_to(self.wal_path)
            raise Damaged(
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
        text = json.dumps({"changes": self.mark.changes, "added": int(self.counter("added"))})
        content = text.encode().ljust(_COUNT_BYTES)
        try:
            os.pwrite(self._count_file, content, 0)
            self._kept_counts = content
        except OSError as error:
            log.warning(
                "%s cannot be written, so that a loss in the log would not be noticed: %s",
                self._count_path,
                error,
            )

    def is_set_back(self) -> bool:
        """Whether another program has replaced the file, or has overwritten it together with its
        counts.
        """
        if super().is_set_back():
            return True
        kept = self._kept_counts
        return self._count_file is not None and os.pread(self._count_file, _COUNT_BYTES, 0) != kept

    def read_mark(self) -> StoreMark:
        """Returns the mark, which only this process changes."""
        return self.mark

    def close(self) -> None:
        if self._count_file is not None:
            os.close(self._count_file)
            self._count_file = None
        super().close()

    def size(self) -> int:
        """Returns the size on disk in bytes, log included; any thread may call it."""
        return sum(file.stat().st_size for file in (self.path, self.wal_path) if file.exists())

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs a transaction, and keeps its totals and counts."""
        with super().transaction() as db:
            yield db
        if self.mark != self._kept:
            with self.errors():
                self.committed = self.totals()
                self._keep_counts()
            self._kept = self.mark

    def counter(self, name: str) -> float:
        with self.errors():
            row = self.db.execute("SELECT * FROM counters WHERE name = ?", (name,)).fetchone()
            return float(unsealed(row, f"the counter {name}")[1])

    def count(self, name: str, more: int) -> None:
        """Adds to a counter, within the caller's transaction."""
        if more:
            self.set_counter(name, int(self.counter(name)) + more)

    def set_counter(self, name: str, value: float) -> None:
        """Sets a counter, within the caller's transaction."""
        self.db.execute("REPLACE INTO counters VALUES (?, ?, ?)", sealed((name, value)))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Returns (groups, completions) by state; `lone` experiences count as completions without a
        group.
        """
        rows = self.db.execute("SELECT state, groups, completions FROM totals")
        return {state: (groups, completions) for state, groups, completions in rows}

    # ------------------------------------------------------------ queries
    # Each sees the state after the last transaction, and raises StorageFailed for rows that are not
    # what was written.

    def records(self, condition: str, *values: object) -> list[tuple[int, GroupRecord]]:
        """Returns the keys and records of the groups that meet an SQL condition."""
        query = f"SELECT key, {COLUMNS}, seal FROM groups {condition}"  # noqa: S608
        with self.errors():
            return [
                (key, GroupRecord(*unsealed(row, f"group {row[0]}")))
                for key, *row in self.db.execute(query, values)
            ]

    def data(self, key: int, record: GroupRecord) -> bytes:
        """Returns a group as msgpack."""
        with self.errors():
            row = self.db.execute("SELECT data FROM blobs WHERE key = ?", (key,)).fetchone()
            if row is None or not isinstance(row[0], bytes) or sum_of(row[0]) != record.data_sum:
                raise Damaged(f"group {record.id} differs from its checksum")
        return row[0]

    def blob(self, group_id: str) -> bytes:
        """Returns the msgpack bytes of a group. Raises NotFound."""
        found = self.records("WHERE id = ?", group_id)
        if not found:
            raise unknown(group_id)
        return self.data(*found[0])

    def listing(self, limit: int, offset: int, state: str | None = None) -> list[Json]:
        """Returns the groups without their contents, in insertion order, optionally only those in
        one state.
        """
        condition = "WHERE state = ? OR ? IS NULL ORDER BY key LIMIT ? OFFSET ?"
        values = (state, state, limit, offset)
        listed = []
        for _, record in self.records(condition, *values):
            shown = {name: getattr(record, name) for name in _LISTED}
            shown["correct"] = None if record.correct == -1 else record.correct
            shown["mean_reward"] = record.reward_sum / record.completions
            listed.append(shown)
        return listed

    def stats(self) -> Json:
        """Returns counts and means over everything stored; means are 0 when nothing is stored."""
        query = (
            "SELECT TOTAL(reward), TOTAL(positive) FROM (SELECT reward_sum AS reward, positive "
            "FROM groups UNION ALL SELECT reward, reward > 0 FROM experiences)"
        )
        with self.errors():
            totals = self.totals()
            reward, positive = self.db.execute(query).fetchone()
        size = sum(completions for _, completions in totals.values())
        states = {state: groups for state, (groups, _) in totals.items() if state != "lone"}
        return {
            "size": size,
            "avg_reward": reward / size if size else 0.0,
            "positive_ratio": positive / size if size else 0.0,
            "groups": sum(states.values()),
            **states,
            "experiences": totals["lone"][1],
            **{name: int(self.counter(name)) for name in COUNTERS},
            "max_priority": self.counter(MAX_PRIORITY),
        }

    def rewards(self) -> list[tuple[int, bytes]]:
        """Returns (key, float32 rewards) of every group and lone experience; keys of lone
        experiences are negative.
        """
        with self.errors():
            lone = self.db.execute("SELECT -key, reward FROM experiences ORDER BY key").fetchall()
            groups = self.db.execute("SELECT key, rewards FROM groups ORDER BY key").fetchall()
        return groups + [(key, _FLOAT32.pack(reward)) for key, reward in lone]

    def reusable(self, min_version: int, max_times: int | None) -> list[tuple[int, float]]:
        """Returns (key, priority) of the consumed groups of `min_version` or newer that were drawn
        fewer than `max_times` times, in an order that does not depend on when they were stored.
        """
        query = (
            "SELECT key, priority FROM groups WHERE state = 'consumed' AND version >= ? AND "
            "(? IS NULL OR times_sampled < ?) ORDER BY version, position, id"
        )
        with self.errors():
            rows = self.db.execute(query, (min_version, max_times, max_times)).fetchall()
            # Read without their checksums, which would need every column.
            if not all(isinstance(priority, float) and isfinite(priority) for _, priority in rows):
                raise Damaged("the priority of a group is not a number")
        return rows

    def blob_at(self, key: int) -> bytes | None:
        """Returns the msgpack bytes of the group with this key; None when it is gone. Keys are
        never used twice.
        """
        found = self.records("WHERE key = ?", key)
        return self.data(*found[0]) if found else None

    def experience_at(self, key: int) -> Json:
        query = "SELECT prompt, response, reward, ground_truth, seal FROM experiences WHERE key = ?"
        with self.errors():
            row = self.db.execute(query, (key,)).fetchone()
            fields = unsealed(row, f"the experience {key}")
        return dict(zip(EXPERIENCE, fields, strict=True))


def unknown(group_id: str) -> NotFound:
    """Returns the error for an unknown group id."""
    return NotFound(
        "there is no such group", field="id", value=group_id, remedy="GET /groups lists the groups"
    )
