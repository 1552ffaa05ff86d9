"""The durable store of the replay buffer: one SQLite file. Every change is one transaction, synced
before it returns.

A group is a row of `groups` (the fields that queries need) and a row of `blobs` (the group as
msgpack; separate, so that a change of state does not rewrite it). Lone experiences, which have no
tokens, are in another table, so no method that hands out groups can return them. All methods are
synchronous and must run in one thread.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from common import Json
from common.errors import InvalidInput
from common.wire.schemas import TakeRequest
from services.http.sqlite_store import Damaged, sealed
from services.replay.database import (
    COLUMNS,
    EXPERIENCE,
    MAX_PRIORITY,
    Database,
    Full,
    GroupRecord,
    unknown,
)

log = logging.getLogger(__name__)
_REMEMBERED_IDS = 100_000
"""Ids of removed groups that are kept, so that a late retry of an add does not bring them back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups leased to one request."""

    ids: list[str]
    blobs: list[bytes]
    """The groups as msgpack; empty if only their ids are wanted."""
    evicted: int
    """Groups that were too old for the request."""


_TAKE = "take"
_SAMPLE = "sample"
_PRIORITIES = "priorities"
_ORDER = "ORDER BY version, position, id"
_VALUES = ", ".join("?" * len(GroupRecord._fields))
_INSERT = f"INSERT INTO groups ({COLUMNS}, seal) VALUES ({_VALUES}, ?)"  # noqa: S608
_CHANGE = (
    "UPDATE groups SET state = ?, request_id = ?, lease_until = ?, priority = ?, "
    "times_sampled = ?, seal = ? WHERE key = ?"
)


class Store(Database):
    """Changes of the stored groups."""

    # ------------------------------------------------------------ adding

    def add(self, groups: Iterable[tuple[GroupRecord, bytes]], capacity: int) -> dict[str, int]:
        """Stores the groups with new ids: their records and the groups as msgpack. Returns how many
        were `added`, and the `duplicates`. Raises Full when they do not fit even after removing all
        consumed groups.
        """
        with self.transaction():
            new: dict[str, tuple[GroupRecord, bytes]] = {}
            duplicates = 0
            for record, data in groups:
                if record.id in new or self._known(record.id):
                    duplicates += 1
                else:
                    new[record.id] = record, data
            self._make_room(sum(record.completions for record, _ in new.values()), capacity)
            for record, data in new.values():
                cursor = self.db.execute(_INSERT, sealed(record))
                self.db.execute("INSERT INTO blobs VALUES (?, ?)", (cursor.lastrowid, data))
            self.count("added", len(new))
            self.count("duplicates", duplicates)
        return {"added": len(new), "duplicates": duplicates}

    def add_experiences(
        self, rows: list[tuple[str, str, float, str | None]], capacity: int
    ) -> None:
        """Stores lone experiences (prompt, response, reward, ground truth)."""
        columns = f"{', '.join(EXPERIENCE)}, seal"
        with self.transaction():
            self._make_room(len(rows), capacity)
            self.db.executemany(
                f"INSERT INTO experiences ({columns}) VALUES (?, ?, ?, ?, ?)",  # noqa: S608
                map(sealed, rows),
            )

    def _change(self, key: int, record: GroupRecord) -> None:
        """Stores what has changed in a record, which was read in this transaction."""
        changed = sealed(record)[-6:]  # the fields in the order of `_CHANGE`
        self.db.execute(_CHANGE, (*changed, key))

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

    def take(
        self, request: TakeRequest, now: float, lease_s: float, *, ends: bool = False
    ) -> Lease | None:
        """Leases the first `count` fresh groups, or returns those this request has leased; None
        when there are too few, unless the request `ends`. A request that has ended gets no groups:
        a copy of it that arrives late would lease them to nobody. If that cannot be stored,
        StorageFailed lets the client ask again.

        Raises InvalidInput when the request id already has a lease with another count or version.
        """
        with self.transaction():
            totals = self.totals()
            fresh, _ = totals["fresh"]
            leased, _ = totals["leased"]
            taken: list[tuple[int, GroupRecord]] = []
            if leased:
                fresh += self.expire(now, request.run_id)
                taken = self.records(f"WHERE request_id = ? {_ORDER}", request.request_id)
            oldest = min((record.version for _, record in taken), default=0)
            if taken and (len(taken) != request.count or oldest < request.min_version):
                raise InvalidInput(
                    f"another request with this request_id has leased {len(taken)} groups from "
                    f"version {oldest} on",
                    field="request_id",
                    value=request.request_id,
                    remedy="use a new id for every request; only a retry of the same request "
                    "repeats its id",
                )
            answer = self.answer_to(_TAKE, request.request_id)
            if not taken:
                # What it evicted is stored with it, since a response may be lost.
                if answer.get("answered"):
                    return Lease([], [], answer.get("evicted", 0))
                if fresh:
                    answer = self._evict(request, answer)
                    taken = self._first_fresh(request.count)
            if len(taken) < request.count:
                if not ends:
                    return None
                taken = []
            for key, record in taken:
                given = record._replace(
                    state="leased", request_id=request.request_id, lease_until=now + lease_s
                )
                self._change(key, given)
            if not answer.get("answered"):
                self.remember(_TAKE, request.request_id, answer | {"answered": True})
            ids = [record.id for _, record in taken]
            read = [] if request.ids_only else taken
            blobs = [self.data(key, record) for key, record in read]
            return Lease(ids, blobs, answer.get("evicted", 0))

    def _first_fresh(self, count: int) -> list[tuple[int, GroupRecord]]:
        """Returns up to `count` fresh groups in the order in which they are taken."""
        found: list[tuple[int, GroupRecord]] = []
        query = f"SELECT key FROM groups WHERE state = 'fresh' {_ORDER} LIMIT ?"  # noqa: S608
        for (key,) in self.db.execute(query, (count,)).fetchall():
            found += self.records("WHERE key = ? AND state = 'fresh'", key)
        # The checksums are of rows: what an index leaves out or puts elsewhere shows here.
        turns = [(record.version, record.position, record.id) for _, record in found]
        waiting, _ = self.totals()["fresh"]
        if turns != sorted(turns) or len(found) < min(count, waiting):
            raise Damaged("the index of the groups that wait to be taken is wrong")
        return found

    def next_expiry(self) -> float | None:
        """Returns the time at which the first lease ends, on the clock of `take`; None without
        leases.
        """
        query = "SELECT MIN(lease_until) FROM groups WHERE request_id IS NOT NULL"
        with self.errors():
            (until,) = self.db.execute(query).fetchone()
        return None if until is None else float(until)

    def _evict(self, request: TakeRequest, answer: Json) -> Json:
        """Removes what is too old for a request; returns what is remembered of it then."""
        old = self.records("WHERE state = 'fresh' AND version < ?", request.min_version)
        if not old:
            return answer
        self._remove([key for key, _ in old], "evicted")
        evicted = len(old) + answer.get("evicted", 0)
        answer = answer | {"evicted": evicted}
        self.remember(_TAKE, request.request_id, answer)
        return answer

    def expire(self, now: float, run_id: str = "") -> int:
        """Makes groups fresh again whose lease has ended, or does not belong to the run `run_id`,
        within the caller's transaction. Returns how many.
        """
        ended = self.records(
            "WHERE request_id IS NOT NULL AND (lease_until <= ? OR instr(request_id, ?) != 1)",
            now,
            run_id,
        )
        requests = Counter(record.request_id or "" for _, record in ended)
        for request, count in requests.items():
            if not request.startswith(run_id):
                log.warning(
                    "request %s has leased %d groups but does not belong to run %s, which gets "
                    "them back",
                    request,
                    count,
                    run_id,
                )
        for key, record in ended:
            self._change(key, record._replace(state="fresh", request_id=None, lease_until=None))
        return len(ended)

    def ack(self, ids: list[str]) -> int:
        """Marks groups as trained on, for reuse with the largest priority seen; those that are
        consumed or removed already stay unchanged.

        Returns how many were newly consumed. Raises NotFound for an unknown id and then changes
        nothing.
        """
        consumed = 0
        with self.transaction():
            largest = self.counter(MAX_PRIORITY)
            for group_id in ids:
                if not self._known(group_id):
                    raise unknown(group_id)
                for key, record in self.records("WHERE id = ? AND state != 'consumed'", group_id):
                    priority = largest if record.priority is None else record.priority
                    trained = record._replace(
                        state="consumed", request_id=None, lease_until=None, priority=priority
                    )
                    self._change(key, trained)
                    consumed += 1
        return consumed

    def reset_fresh(self, from_position: int | None, step: int | None, run_id: str) -> int:
        """Drops all unconsumed groups and, with `from_position`, all groups from that prompt-stream
        position on.

        Their ids may be added again. With `step`, undoes what `reuse` counted in that step and
        later. With `run_id` that run begins, which it does only once. Returns how many groups were
        dropped.
        """
        with self.transaction():
            if run_id in self.runs():
                return 0
            self.begin_run(run_id)
            # Nothing is >= NULL.
            leaving = self.records("WHERE state != 'consumed' OR position >= ?", from_position)
            keys = [(key,) for key, _ in leaving]
            self.db.executemany("DELETE FROM groups WHERE key = ?", keys)
            self.count("dropped", len(keys))
            if step is not None:
                self._take_back(step)
        return len(keys)

    def _take_back(self, step: int) -> None:
        query = "SELECT key, request FROM answers WHERE call = ?"
        for key, request_id in self.db.execute(query, (_SAMPLE,)).fetchall():
            drawn = self.answer_to(_SAMPLE, request_id)
            if drawn["step"] is not None and drawn["step"] >= step:
                self._count_draws(drawn["keys"], -1)
                self.db.execute("DELETE FROM answers WHERE key = ?", (key,))

    # ------------------------------------------------------------ reuse

    def count_draw(
        self, keys: list[int], weights: list[float], request_id: str | None, step: int | None
    ) -> None:
        """Counts one draw of each group and stores the draw by request id."""
        with self.transaction():
            self._count_draws(keys, 1)
            if request_id is not None:
                drawn = {"keys": keys, "weights": weights, "step": step}
                self.remember(_SAMPLE, request_id, drawn)

    def _count_draws(self, keys: list[int], more: int) -> None:
        for key in keys:
            for _, record in self.records("WHERE key = ?", key):  # it may have been removed
                self._change(key, record._replace(times_sampled=record.times_sampled + more))

    def draw_of(self, request_id: str | None) -> tuple[list[int], list[float]] | None:
        """Returns the keys and weights drawn for this request; None if it is new."""
        drawn = {} if request_id is None else self.answer_to(_SAMPLE, request_id)
        return (drawn["keys"], drawn["weights"]) if drawn else None

    def set_priorities(
        self, priorities: list[tuple[str, float]], request_id: str | None = None
    ) -> int:
        """Sets priorities by id; unknown ids are skipped. Returns how many consumed groups are
        among them. A request that is repeated changes nothing.
        """
        changed = 0
        with self.transaction():
            answer = {} if request_id is None else self.answer_to(_PRIORITIES, request_id)
            if answer:
                return int(answer["changed"])
            for group_id, priority in priorities:
                for key, record in self.records("WHERE id = ?", group_id):
                    self._change(key, record._replace(priority=priority))
                    changed += record.state == "consumed"
            largest = max(priority for _, priority in priorities)
            self.set_counter(MAX_PRIORITY, max(self.counter(MAX_PRIORITY), largest))
            if request_id is not None:
                self.remember(_PRIORITIES, request_id, {"changed": changed})
        return changed

    def clear(self) -> None:
        """Deletes everything except the counters and the answers to requests."""
        with self.transaction():
            for table in ("groups", "experiences", "gone"):
                self.db.execute(f"DELETE FROM {table}")  # noqa: S608
            self.set_counter(MAX_PRIORITY, 1.0)
