"""The durable store of the replay buffer: one SQLite file. Every change is one transaction, synced
before it returns.

A group is a row of `groups` (the fields that queries need) and a row of `blobs` (the group as
msgpack; separate, so that a change of state does not rewrite it). Lone experiences, which have no
tokens, are in another table, so no method that hands out groups can return them. All methods are
synchronous and must run in one thread.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import InvalidInput
from common.wire.schemas import TakeRequest
from services.replay.database import Full
from services.replay.reading import Reading, unknown

log = logging.getLogger(__name__)
_REMEMBERED_REQUESTS = 1000
"""Responses kept for late retries."""
_REMEMBERED_IDS = 100_000
"""Ids of removed groups that are kept, so that a late retry of an add does not bring them back."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group to store."""

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
    data: bytes


@dataclass(frozen=True, slots=True)
class AddResult:
    """Outcome of an add."""

    added: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Encoded groups leased to one request."""

    blobs: list[bytes]
    evicted: int
    """Groups that were too old for the request."""


_COLUMNS = tuple(name for name in GroupRow.__dataclass_fields__ if name != "data")
_VALUES = ", ".join("?" for _ in _COLUMNS)
_INSERT = f"INSERT INTO groups ({', '.join(_COLUMNS)}) VALUES ({_VALUES})"  # noqa: S608


class Store(Reading):
    """Changes of the stored groups."""

    # ------------------------------------------------------------ adding

    def add(self, rows: Iterable[GroupRow], capacity: int) -> AddResult:
        """Stores the groups with new ids. Raises Full when they do not fit even after removing all
        consumed groups.
        """
        with self.transaction():
            new: dict[str, GroupRow] = {}
            duplicates = 0
            for row in rows:
                if row.id in new or self._known(row.id):
                    duplicates += 1
                else:
                    new[row.id] = row
            self._make_room(sum(row.completions for row in new.values()), capacity)
            for row in new.values():
                cursor = self.db.execute(_INSERT, [getattr(row, column) for column in _COLUMNS])
                self.db.execute("INSERT INTO blobs VALUES (?, ?)", (cursor.lastrowid, row.data))
            self.count("added", len(new))
            self.count("duplicates", duplicates)
        return AddResult(len(new), duplicates)

    def add_experiences(
        self, rows: list[tuple[str, str, float, str | None]], capacity: int
    ) -> None:
        """Stores lone experiences (prompt, response, reward, ground truth)."""
        with self.transaction():
            self._make_room(len(rows), capacity)
            self.db.executemany(
                "INSERT INTO experiences (prompt, response, reward, ground_truth) VALUES (?, ?, "
                "?, ?)",
                rows,
            )

    def _known(self, group_id: str) -> bool:
        query = "SELECT 1 FROM groups WHERE id = :id UNION ALL SELECT 1 FROM gone WHERE id = :id"
        return self.db.execute(query, {"id": group_id}).fetchone() is not None

    def _make_room(self, needed: int, capacity: int) -> None:
        """Removes the oldest consumed groups, then the oldest lone experiences."""
        totals = self.totals()
        excess = sum(completions for _, completions in totals.values()) + needed - capacity
        if excess > totals["consumed"][1] + totals["lone"][1]:
            waiting = totals["fresh"][1] + totals["leased"][1]
            raise Full(
                f"no room for {needed} completions: {waiting} of {capacity} wait to be trained on",
                field="replay.capacity",
                value=capacity,
                remedy="try again when groups have been acknowledged, or raise replay.capacity",
            )
        leaving: list[int] = []
        # In the order of an index, so that the loop ends early.
        query = (
            "SELECT key, completions FROM groups WHERE state = 'consumed' "
            "ORDER BY version, position, id"
        )
        for key, completions in self.db.execute(query):
            if excess <= 0:
                break
            leaving.append(key)
            excess -= completions
        self._remove(leaving, "removed")
        if excess > 0:
            self.db.execute(
                "DELETE FROM experiences WHERE key IN (SELECT key FROM experiences ORDER BY key "
                "LIMIT ?)",
                (excess,),
            )

    def _remove(self, keys: list[int], counter: str) -> None:
        """Deletes groups and remembers their ids."""
        if not keys:
            return
        parameters = [(key,) for key in keys]
        self.db.executemany("INSERT INTO gone (id) SELECT id FROM groups WHERE key = ?", parameters)
        self.db.executemany("DELETE FROM groups WHERE key = ?", parameters)
        self.db.execute(
            "DELETE FROM gone WHERE key <= (SELECT MAX(key) FROM gone) - ?", (_REMEMBERED_IDS,)
        )
        self.count(counter, len(keys))

    # ------------------------------------------------------------ the queue

    def take(self, request: TakeRequest, now: float, lease_s: float) -> Lease | None:
        """Leases the first `count` fresh groups, or returns those this request has leased; None
        when there are too few.

        Raises InvalidInput when the request id already has a lease with another count or version.
        """
        with self.transaction():
            self._expire(now)
            if request.run_id:
                self._end_strays(request.run_id)
            rows = self.db.execute(
                "SELECT key, version FROM groups WHERE request_id = ? ORDER BY version, position, "
                "id",
                (request.request_id,),
            ).fetchall()
            if rows and (len(rows) != request.count or rows[0][1] < request.min_version):
                raise InvalidInput(
                    f"another request with this request_id has leased {len(rows)} groups from "
                    f"version {rows[0][1]} on",
                    field="request_id",
                    value=request.request_id,
                    remedy="use a new id for every request; only a retry of the same request "
                    "repeats "
                    "its id",
                )
            if not rows:
                self._evict(request)
                rows = self.db.execute(
                    "SELECT key FROM groups WHERE state = 'fresh' ORDER BY version, position, id "
                    "LIMIT ?",
                    (request.count,),
                ).fetchall()
            if len(rows) < request.count:
                return None
            self.db.executemany(
                "UPDATE groups SET state = 'leased', request_id = ?, lease_until = ? WHERE key = ?",
                [(request.request_id, now + lease_s, row[0]) for row in rows],
            )
            blobs = [
                self.db.execute("SELECT data FROM blobs WHERE key = ?", row[:1]).fetchone()[0]
                for row in rows
            ]
            return Lease(blobs, self.evicted_for(request.request_id))

    def expire(self, now: float) -> None:
        """Makes groups whose lease has ended fresh again."""
        with self.transaction():
            self._expire(now)

    def evicted_for(self, request_id: str) -> int:
        """Returns how many groups were too old for this request. The number is stored, since a
        response may be lost.
        """
        row = self.db.execute(
            "SELECT evicted FROM takes WHERE request_id = ?", (request_id,)
        ).fetchone()
        return int(row[0]) if row else 0

    def next_expiry(self) -> float | None:
        """Returns the time at which the first lease ends, on the clock of `take`; None without
        leases.
        """
        (until,) = self.db.execute(
            "SELECT MIN(lease_until) FROM groups WHERE request_id IS NOT NULL"
        ).fetchone()
        return None if until is None else float(until)

    def _evict(self, request: TakeRequest) -> None:
        query = "SELECT key FROM groups WHERE state = 'fresh' AND version < ?"
        old = [key for (key,) in self.db.execute(query, (request.min_version,))]
        self._remove(old, "evicted")
        if old:
            self.db.execute(
                "INSERT INTO takes VALUES (?, ?) ON CONFLICT DO UPDATE SET evicted = evicted + "
                "excluded.evicted",
                (request.request_id, len(old)),
            )
            self.db.execute(
                "DELETE FROM takes WHERE rowid <= (SELECT MAX(rowid) FROM takes) - ?",
                (_REMEMBERED_REQUESTS,),
            )

    def _expire(self, now: float) -> None:
        self._end_leases("lease_until <= ?", now)

    def _end_strays(self, run_id: str) -> None:
        query = (
            "SELECT request_id, COUNT(*) FROM groups WHERE request_id IS NOT NULL AND "
            "instr(request_id, ?) != 1 GROUP BY 1"
        )
        for request, count in self.db.execute(query, (run_id,)).fetchall():
            log.warning(
                "request %s has leased %d groups but does not belong to run %s, which gets them "
                "back",
                request,
                count,
                run_id,
            )
            self._end_leases("request_id = ?", request)

    def _end_leases(self, condition: str, value: object) -> None:
        leased = f"FROM groups WHERE request_id IS NOT NULL AND {condition}"
        if not self.db.execute(f"SELECT 1 {leased}", (value,)).fetchone():
            return
        takes = f"SELECT request_id {leased}"
        self.db.execute(f"DELETE FROM takes WHERE request_id IN ({takes})", (value,))  # noqa: S608
        fresh = "state = 'fresh', request_id = NULL, lease_until = NULL"
        keys = f"SELECT key {leased}"
        self.db.execute(f"UPDATE groups SET {fresh} WHERE key IN ({keys})", (value,))  # noqa: S608

    def ack(self, ids: list[str]) -> int:
        """Marks groups as consumed; already consumed and removed ones stay unchanged.

        Returns how many were newly consumed. Raises NotFound for an unknown id and then changes
        nothing.
        """
        consumed = 0
        query = (
            "UPDATE groups SET state = 'consumed', request_id = NULL, lease_until = NULL, "
            "priority = COALESCE(priority, ?) WHERE id = ? AND state != 'consumed'"
        )
        with self.transaction():
            priority = self.counter("max_priority")
            for group_id in ids:
                if not self._known(group_id):
                    raise unknown(group_id)
                consumed += self.db.execute(query, (priority, group_id)).rowcount
        return consumed

    def reset_fresh(self, from_position: int | None, step: int | None) -> int:
        """Drops all unconsumed groups and, with `from_position`, all groups from that prompt-stream
        position on.

        Their ids may be added again. With `step`, undoes what `reuse` counted in that step and
        later. Returns how many groups were dropped.
        """
        with self.transaction():
            # nothing is >= NULL
            query = "DELETE FROM groups WHERE state != 'consumed' OR position >= ?"
            dropped = self.db.execute(query, (from_position,)).rowcount
            self.db.execute("DELETE FROM takes")
            self.count("dropped", dropped)
            if step is not None:
                self._take_back(step)
        return dropped

    def _take_back(self, step: int) -> None:
        for key, answer in self.db.execute("SELECT key, answer FROM samples").fetchall():
            drawn, _, drawn_at = json.loads(answer)
            if drawn_at is not None and drawn_at >= step:
                query = "UPDATE groups SET times_sampled = times_sampled - 1 WHERE key = ?"
                self.db.executemany(query, [(group,) for group in drawn])
                self.db.execute("DELETE FROM samples WHERE key = ?", (key,))

    # ------------------------------------------------------------ reuse

    def count_draw(
        self, keys: list[int], weights: list[float], request_id: str | None, step: int | None
    ) -> None:
        """Counts one draw of each group and stores the draw by request id."""
        with self.transaction():
            query = "UPDATE groups SET times_sampled = times_sampled + 1 WHERE key = ?"
            self.db.executemany(query, [(key,) for key in keys])
            if request_id is not None:
                answer = json.dumps([keys, weights, step])
                self.db.execute(
                    "INSERT INTO samples (request_id, answer) VALUES (?, ?)", (request_id, answer)
                )
                query = "DELETE FROM samples WHERE key <= (SELECT MAX(key) FROM samples) - ?"
                self.db.execute(query, (_REMEMBERED_REQUESTS,))

    def draw_of(self, request_id: str | None) -> tuple[list[int], list[float]] | None:
        """Returns the keys and weights drawn for this request; None if it is new."""
        query = "SELECT answer FROM samples WHERE request_id = ?"
        row = self.db.execute(query, (request_id,)).fetchone()
        if row is None:
            return None
        keys, weights, _ = json.loads(row[0])
        return keys, weights

    def set_priorities(self, priorities: list[tuple[str, float]]) -> int:
        """Sets priorities by id; unknown ids are skipped. Returns how many consumed groups are
        among them.
        """
        changed = 0
        query = "UPDATE groups SET priority = ? WHERE id = ? RETURNING state"
        with self.transaction():
            for group_id, priority in priorities:
                states = self.db.execute(query, (priority, group_id)).fetchall()
                changed += states.count(("consumed",))
            largest = max(self.counter("max_priority"), *(priority for _, priority in priorities))
            self.db.execute("UPDATE counters SET value = ? WHERE name = 'max_priority'", (largest,))
        return changed

    def clear(self) -> None:
        """Deletes everything except the counters."""
        with self.transaction():
            for table in ("groups", "experiences", "takes", "samples", "gone"):
                self.db.execute(f"DELETE FROM {table}")  # noqa: S608
            self.db.execute("UPDATE counters SET value = 1.0 WHERE name = 'max_priority'")
