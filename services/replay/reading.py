"""Queries of the store."""

import struct
from typing import Any

from common.errors import NotFound
from services.replay.database import COUNTERS, Database

_FLOAT32 = struct.Struct("<f")


class Reading(Database):
    """Queries; each sees the state after the last transaction."""

    def blob(self, group_id: str) -> bytes:
        """Returns the msgpack bytes of a group. Raises NotFound."""
        query = "SELECT data FROM groups JOIN blobs USING (key) WHERE id = ?"
        row = self.db.execute(query, (group_id,)).fetchone()
        if row is None:
            raise unknown(group_id)
        return bytes(row[0])

    def listing(self, limit: int, offset: int, state: str | None = None) -> list[dict[str, Any]]:
        """Returns the groups without their contents, in insertion order, optionally only those in
        one state.
        """
        query = (
            "SELECT id, prompt_id, state, version, position, completions, NULLIF(correct, -1) AS "
            "correct, reward_sum / completions AS mean_reward, priority, times_sampled, created "
            "FROM groups WHERE state = :state OR :state IS NULL ORDER BY key LIMIT :limit OFFSET "
            ":offset"
        )
        return self._rows(query, state=state, limit=limit, offset=offset)

    def _rows(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        cursor = self.db.execute(query, parameters)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def stats(self) -> dict[str, Any]:
        """Returns counts and means over everything stored; means are 0 when nothing is stored."""
        totals = self.totals()
        reward, positive = self.db.execute(
            "SELECT TOTAL(reward), TOTAL(positive) FROM (SELECT reward_sum AS reward, positive "
            "FROM groups UNION ALL SELECT reward, reward > 0 FROM experiences)"
        ).fetchone()
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
            "max_priority": self.counter("max_priority"),
        }

    def rewards(self) -> list[tuple[int, bytes]]:
        """Returns (key, float32 rewards) of every group and lone experience; keys of lone
        experiences are negative.
        """
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
        return self.db.execute(query, (min_version, max_times, max_times)).fetchall()

    def blob_at(self, key: int) -> bytes | None:
        """Returns the msgpack bytes of the group with this key, which none gets twice; None when it
        is gone.
        """
        row = self.db.execute("SELECT data FROM blobs WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def experience_at(self, key: int) -> dict[str, Any]:
        return self._rows(
            "SELECT prompt, response, reward, ground_truth FROM experiences WHERE key = :key",
            key=key,
        )[0]


def unknown(group_id: str) -> NotFound:
    """Returns the error for an unknown group id."""
    return NotFound(
        "there is no such group", field="id", value=group_id, remedy="GET /groups lists the groups"
    )
