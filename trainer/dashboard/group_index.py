"""Searchable index of a run's groups: SQLite in memory, filled from `groups.jsonl` as the file
grows.
"""

import math
import sqlite3
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from msgspec.structs import asdict
from pydantic import BaseModel, ConfigDict, Field

from common import Json
from trainer.observe.group_files import LINES, GroupSummary, StepGroups
from trainer.observe.jsonl import JsonlReader
from trainer.observe.regrades import REGRADES, RegradedGroup, read_regrades

_EXCERPT_CHARS = 200
_SCHEMA = """
CREATE TABLE groups (
    step INTEGER, place INTEGER, id TEXT NOT NULL, prompt_id TEXT, position INTEGER,
    reward REAL, length INTEGER, advantage REAL, delta REAL, reason TEXT,
    marks TEXT NOT NULL, shown TEXT NOT NULL
);
CREATE INDEX by_id ON groups (id, step);
CREATE INDEX by_prompt ON groups (prompt_id, step);
CREATE TABLE regraded (step INTEGER, id TEXT, PRIMARY KEY (step, id)) WITHOUT ROWID;
CREATE TABLE prompts (
    prompt_id TEXT PRIMARY KEY, excerpt TEXT NOT NULL, folded TEXT NOT NULL
) WITHOUT ROWID;
"""
_INSERT = """
INSERT INTO groups VALUES (
    :step, :place, :id, :prompt_id, :position, :reward,
    :length, :advantage, :delta, :reason, :marks, :shown
)
"""
# Marks of completions that were not graded or not finished, and of groups that lack episodes.
_ENDINGS = (
    "unparsable",
    "unevaluated",
    "inapplicable",
    "timeout",
    "died",
    "error",
    "truncated",
    "aborted",
    "lost",
)
# Reasons of drops (each also `dropped`), and marks of other groups; `regraded`: `rlhf regrade`
# gives an answer another grade.
_MARKS = (
    "dropped",
    "generation",
    "reward",
    "stale",
    "zero_variance",
    "reused",
    "regraded",
    *_ENDINGS,
)
_ENDS_UNUSUALLY = " OR ".join(f"instr(marks, '|{mark}|')" for mark in _ENDINGS)
# Parameters are the fields of `Query`, and the case-folded text.
_WHERE = f"""
    (:step_from IS NULL OR step >= :step_from) AND (:step_to IS NULL OR step <= :step_to)
    AND (:reward_min IS NULL OR reward >= :reward_min)
    AND (:reward_max IS NULL OR reward <= :reward_max)
    AND (:length_min IS NULL OR length >= :length_min)
    AND (:length_max IS NULL OR length <= :length_max)
    AND (:text = '' OR prompt_id = :text OR id = :text
        OR prompt_id IN (SELECT prompt_id FROM prompts WHERE instr(folded, :folded)))
    AND CASE ifnull(:error, '')
        WHEN '' THEN 1
        WHEN 'none' THEN marks IN ('||', '|reused|')
        WHEN 'any' THEN reason != '' OR {_ENDS_UNUSUALLY}
        WHEN 'regraded' THEN (step, id) IN (SELECT step, id FROM regraded)
        ELSE instr(marks, '|' || :error || '|')
    END
"""  # noqa: S608
Whole = Annotated[int, Field(ge=0, lt=2**53)]
# What the page gets of a group.
_Row = Json


class Query(BaseModel):
    """Filters and order of a search; None means no filter."""

    model_config = ConfigDict(allow_inf_nan=False)

    step_from: Whole | None = None
    step_to: Whole | None = None
    reward_min: float | None = None
    """Mean over the completions."""
    reward_max: float | None = None
    length_min: Whole | None = None
    """Tokens of the longest completion."""
    length_max: Whole | None = None
    text: str = Field("", max_length=1000)
    """Text in the prompt, in any case, or the id of a prompt or a group."""
    error: str | None = Field(None, pattern=f"^(any|none|{'|'.join(_MARKS)})$")
    """A mark; `any`: every group with an unusual ending or a reason, `none`: every other group."""
    sort: str = Field("-step", pattern="^-?(step|reward|length|advantage|delta|position)$")
    """A column; with a minus, largest first."""


class GroupIndex:
    """Groups of a run directory, complete or not. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._lock = threading.Lock()
        self._lines = JsonlReader(run_dir / LINES, msgspec.json.Decoder(StepGroups).decode)
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.executescript(_SCHEMA)
        self._left: dict[str, int] | None = None
        self._run_dir = run_dir
        self._regrades: dict[tuple[int, str], RegradedGroup] = {}
        self._regraded_at = 0

    def search(
        self,
        query: Query,
        *,
        limit: int,
        offset: int,
        around: tuple[str, int | None] | None = None,
        patience_s: float = math.inf,
    ) -> tuple[int, int, list[_Row]]:
        """Returns the number of matching groups, the offset, and up to `limit` rows from there, in
        query order.

        The offset is `offset`, or that of the page with the group `around` (id and step; None: its
        newest one). After `patience_s` only the part of the file read so far is searched.
        """
        values = {**query.model_dump(), "folded": query.text.casefold(), "limit": limit}
        column = query.sort.removeprefix("-")
        direction = "DESC" if query.sort.startswith("-") else "ASC"
        order = f"{column} {direction} NULLS LAST, step DESC, place"
        with self._lock:
            self._refresh(patience_s)
            matching = f"FROM groups WHERE {_WHERE}"
            (total,) = self._db.execute(f"SELECT COUNT(*) {matching}", values).fetchone()
            if around is not None:
                number = f"ROW_NUMBER() OVER (ORDER BY {order}) AS number"
                values["id"], values["step"] = around
                find = (
                    f"SELECT number FROM (SELECT id, step, {number} {matching}) "  # noqa: S608
                    "WHERE id = :id AND (step = :step OR :step IS NULL) ORDER BY step DESC LIMIT 1"
                )
                place = self._db.execute(find, values).fetchone()
                offset = (place[0] - 1) // limit * limit if place else offset
            # Ordering and counting need no prompts: only the rows of the page are joined with them.
            chosen = f"SELECT groups.rowid {matching} ORDER BY {order} LIMIT :limit OFFSET :offset"
            values["offset"] = offset
            rows = self._rows(f"groups.rowid IN ({chosen}) ORDER BY {order}", values)
        return total, offset, rows

    def find(self, group_id: str, step: int | None = None) -> _Row | None:
        """Returns the group as of the newest step, or `step`, that trained on it or dropped it;
        None if none did.
        """
        query = "id = ?1 AND (step = ?2 OR ?2 IS NULL) ORDER BY step DESC LIMIT 1"
        with self._lock:
            self._refresh()
            return next(iter(self._rows(query, (group_id, step))), None)

    def of_prompt(self, prompt_id: str, limit: int) -> list[_Row]:
        """Returns the newest groups of a prompt, by step."""
        query = "prompt_id = ? ORDER BY step DESC, place DESC LIMIT ?"
        with self._lock:
            self._refresh()
            return self._rows(query, (prompt_id, limit))[::-1]

    def _rows(self, condition: str, values: Any) -> list[_Row]:
        source = "groups LEFT JOIN prompts USING (prompt_id)"
        query = f"SELECT shown, excerpt FROM {source} WHERE {condition}"  # noqa: S608
        rows = []
        for shown, prompt in self._db.execute(query, values):
            row: _Row = {**orjson.loads(shown), "prompt": prompt}
            regrade = self._regrades.get((row["step"], row["id"]))
            row["regraded"] = regrade and msgspec.to_builtins(regrade, str_keys=True)
            rows.append(row)
        return rows

    def problems(self) -> list[str]:
        """Returns a sentence for each missing or damaged part."""
        with self._lock:
            found = self._lines.problems()
            if not self._lines.path.exists():
                found.append(f"{LINES} is missing: which groups a step trained on is not known")
            return found

    def left(self) -> dict[str, int] | None:
        """Returns how many bytes of `groups.jsonl` are read (`done`) of the total (`of`); None when
        all are.
        """
        with self._lock:
            return self._left

    def _refresh(self, patience_s: float = math.inf) -> None:
        end = time.monotonic() + patience_s
        with self._db:
            self._db.execute("BEGIN")
            if self._lines.replaced():
                self._db.execute("DELETE FROM groups")
            self._left = None
            for line in self._lines.read():
                self._insert(line)
                size = self._lines.path.stat().st_size
                if time.monotonic() > end and self._lines.done < size:
                    self._left = {"done": self._lines.done, "of": size}
                    break
            self._read_regrades()

    def _read_regrades(self) -> None:
        """Reads the file of `rlhf regrade` if it is another one than before."""
        path = self._run_dir / REGRADES
        changed = path.stat().st_mtime_ns if path.exists() else 0
        if changed == self._regraded_at:
            return
        self._regraded_at = changed
        self._regrades = read_regrades(self._run_dir)
        self._db.execute("DELETE FROM regraded")
        self._db.executemany("INSERT INTO regraded VALUES (?, ?)", self._regrades)

    def _insert(self, line: StepGroups) -> None:
        groups = [*line.groups, *line.dropped]
        rows = []
        for place, group in enumerate(groups):
            row = _row(line.step, place, group)
            marks = f"|{'|'.join(row['marks'])}|"
            length = max(group.tokens or (), default=None)
            rows.append(row | {"shown": orjson.dumps(row), "marks": marks, "length": length})
        self._db.executemany(_INSERT, rows)
        prompts = [
            (group.prompt_id, group.prompt[:_EXCERPT_CHARS], group.prompt.casefold())
            for group in groups
            if group.prompt_id is not None and group.prompt is not None
        ]
        self._db.executemany("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?)", prompts)


def _row(step: int, place: int, group: GroupSummary) -> _Row:
    """Returns what the page gets of a group: its summary without the prompt, which the groups of a
    prompt share, and with the place of the group.
    """
    row = asdict(group)
    del row["prompt"], row["first"]
    completion = None
    if group.first is not None:
        completion = {"number": 1, "reward": group.rewards[0], **asdict(group.first)}
    marks = [*group.marks]
    if group.reused:
        marks.append("reused")
    if group.reason:
        marks += ["dropped", group.reason]
    count = None if group.tokens is None else len(group.tokens)
    of_place = {"step": step, "place": place, "marks": marks}
    return {**row, **of_place, "completions": count, "completion": completion}
