"""Queries of the store."""

import struct
from math import isfinite
from typing import Any, NamedTuple

from common.errors import NotFound
from services.http.sqlite_store import Damaged, sum_of, unsealed
from services.replay.database import COUNTERS, MAX_PRIORITY, Database

_FLOAT32 = struct.Struct("<f")


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


class Queries(Database):
    """Queries; each sees the state after the last transaction. Raises StorageFailed for rows that
    are not what was written.
    """

    def check_content(self) -> None:
        """Raises Damaged also for a record that is not what was written."""
        super().check_content()
        last = 0
        while found := self.records("WHERE key > ? ORDER BY key LIMIT 10000", last):
            last = found[-1][0]

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

    def listing(self, limit: int, offset: int, state: str | None = None) -> list[dict[str, Any]]:
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

    def stats(self) -> dict[str, Any]:
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
        """Returns the msgpack bytes of the group with this key, which none gets twice; None when it
        is gone.
        """
        found = self.records("WHERE key = ?", key)
        return self.data(*found[0]) if found else None

    def experience_at(self, key: int) -> dict[str, Any]:
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
