"""Searchable index of a run's groups: SQLite in memory, filled from `groups.jsonl` as the file
grows.
"""

import math
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from common.errors import ServiceError
from trainer.dashboard.jsonl import JsonlReader
from trainer.dashboard.replay import Replay
from trainer.dashboard.texts import Place
from trainer.observe.group_files import LINES
from trainer.observe.run_dir import ATTEMPTS, run_ids

_REPLAY_EVERY_S = 2.0
_ROWS_AT_ONCE = 1000
_EXCERPT_CHARS = 200
_NEWEST_BYTES = 256 << 10
"""Bytes at the end of a long file that are read first: a page starts with the newest groups."""
_SCHEMA = """
CREATE TABLE groups (
    step INTEGER, place INTEGER, id TEXT NOT NULL, prompt_id TEXT, position INTEGER,
    oldest INTEGER, newest INTEGER, reward REAL, rewards TEXT, correct INTEGER,
    completions INTEGER, tokens INTEGER, lengths TEXT, advantage REAL, delta REAL,
    marks TEXT NOT NULL, reused INTEGER, reason TEXT, detail TEXT
);
CREATE INDEX by_id ON groups (id, step);
CREATE INDEX by_prompt ON groups (prompt_id, step);
CREATE TABLE hits (step INTEGER, place INTEGER, PRIMARY KEY (step, place)) WITHOUT ROWID;
CREATE TABLE prompts (
    prompt_id TEXT PRIMARY KEY, excerpt TEXT NOT NULL, folded TEXT NOT NULL
) WITHOUT ROWID;
"""
_COLUMNS = (
    "step",
    "place",
    "id",
    "prompt_id",
    "position",
    "oldest",
    "newest",
    "reward",
    "rewards",
    "correct",
    "completions",
    "tokens",
    "lengths",
    "advantage",
    "delta",
    "marks",
    "reused",
    "reason",
    "detail",
)
_INSERT = f"INSERT INTO groups VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"  # noqa: S608
_SHOWN = ", ".join(_COLUMNS).replace("prompt_id", "prompt_id, excerpt AS prompt")
_FROM = "FROM groups LEFT JOIN prompts USING (prompt_id)"
_ENDINGS = (
    "unparsable",
    "unevaluated",
    "inapplicable",
    "timeout",
    "died",
    "error",
    "truncated",
    "aborted",
)
"""Marks of completions that were not graded or not finished."""
_MARKS = (
    "dropped",
    "generation",
    "reward",
    "stale",
    "zero_variance",
    "waiting",
    "reused",
    *_ENDINGS,
)
"""Reasons of drops (each also `dropped`), and marks of other groups; `waiting` ones are in the
replay-buffer."""
Whole = Annotated[int, Field(ge=0, lt=2**53)]
_Row = dict[str, Any]
"""A row of the table `groups`, by `_COLUMNS`."""


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
    """Text in the prompt or a completion, in any case, or the id of a prompt or a group."""
    error: str | None = Field(None, pattern=f"^(any|none|{'|'.join(_MARKS)})$")
    """A mark; `any`: every group with an unusual ending or a reason, `none`: every other group."""
    sort: str = Field("-step", pattern="^-?(step|reward|length|advantage|delta|position)$")
    """A column; with a minus, largest first."""


class GroupIndex:
    """Groups of a run directory, complete or not, and those waiting in its replay-buffer.
    Thread-safe.
    """

    def __init__(self, run_dir: Path, replay: Replay | None = None) -> None:
        self._replay = replay
        self._lock = threading.Lock()
        self._run_dir = run_dir
        self._lines = JsonlReader(run_dir / LINES)
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.executescript(_SCHEMA)
        self._prompts: set[str] = set()
        """Ids of the prompts whose text is stored."""
        self._left: dict[str, int] | None = None
        self._asked_at = -_REPLAY_EVERY_S
        self._waiting: list[_Row] = []
        """A row for each group that waits in the replay-buffer."""
        self._replay_problem = ""

    def search(
        self,
        query: Query,
        limit: int,
        offset: int,
        hits: Iterable[Place] = (),
        around: tuple[str, int | None] | None = None,
        patience_s: float = math.inf,
    ) -> tuple[int, int, list[dict[str, Any]]]:
        """Returns the number of matching groups, the offset, and up to `limit` rows from there, in
        query order.

        `hits` are the groups with a completion that contains `query.text`. The offset is `offset`,
        or that of the page with the group `around` (id and step). After `patience_s` only the part
        of the file read so far is searched.
        """
        where, values = _where(query)
        source = _FROM if query.text else "FROM groups"
        column = query.sort.removeprefix("-").replace("length", "tokens")
        direction = "DESC" if query.sort.startswith("-") else "ASC"
        # Groups that wait have no step: they are the newest.
        nulls = "FIRST" if query.sort == "-step" else "LAST"
        order = f"{column} {direction} NULLS {nulls}, step DESC, place"
        with self._lock:
            self._refresh(patience_s)
            if query.text:
                self._db.execute("DELETE FROM hits")
                self._db.executemany("INSERT INTO hits VALUES (?, ?)", hits)
            count = f"SELECT COUNT(*) {source} WHERE {where}"
            (total,) = self._db.execute(count, values).fetchone()
            if around is not None:
                numbered = (
                    f"SELECT id, step, ROW_NUMBER() OVER (ORDER BY {order}) AS number "
                    f"{source} WHERE {where}"
                )
                find = f"SELECT number FROM ({numbered}) WHERE id = ? AND step IS ?"  # noqa: S608
                place = self._db.execute(find, [*values, *around]).fetchone()
                offset = (place[0] - 1) // limit * limit if place else offset
            chosen = f"SELECT groups.rowid {source} WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
            page = f"SELECT {_SHOWN} {_FROM} WHERE groups.rowid IN ({chosen}) ORDER BY {order}"
            rows = self._db.execute(page, [*values, limit, offset]).fetchall()
        return total, offset, [_shown(row) for row in rows]

    def find(self, group_id: str, step: int | None = None) -> dict[str, Any] | None:
        """Returns the group as of the newest step, or `step`, that trained on it or dropped it;
        None if none did.
        """
        query = (
            f"SELECT {_SHOWN} {_FROM} WHERE id = ?1 AND (step = ?2 OR ?2 IS NULL) "
            "ORDER BY step DESC LIMIT 1"
        )
        with self._lock:
            self._refresh()
            row = self._db.execute(query, (group_id, step)).fetchone()
        return None if row is None else _shown(row)

    def of_prompt(self, prompt_id: str, limit: int) -> list[dict[str, Any]]:
        query = (
            f"SELECT {_SHOWN} {_FROM} WHERE prompt_id = ? "
            "ORDER BY step DESC NULLS FIRST, place DESC LIMIT ?"
        )
        with self._lock:
            self._refresh()
            rows = self._db.execute(query, (prompt_id, limit)).fetchall()
        return [_shown(row) for row in reversed(rows)]

    def problems(self) -> list[str]:
        """Returns a sentence for each missing or damaged part."""
        with self._lock:
            found = self._lines.problems()
            if not self._lines.path.exists():
                found.append(f"{LINES} is missing: which groups a step trained on is not known")
            if self._replay_problem:
                found.append(self._replay_problem)
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
            replaced = self._lines.replaced()
            if replaced:
                self._db.execute("DELETE FROM groups")
            rows: list[_Row] = []
            prompts: dict[str, str] = {}
            self._left = None
            for _, line in self._lines.read(_NEWEST_BYTES):
                for row, prompt in _line_rows(line):
                    rows.append(row)
                    prompts |= prompt
                if len(rows) >= _ROWS_AT_ONCE:
                    self._insert(rows, prompts)
                    rows = []
                    prompts = {}
                    if time.monotonic() > end:
                        self._left = {
                            "done": self._lines.done,
                            "of": self._lines.path.stat().st_size,
                        }
                        break
            self._insert(rows, prompts)
            if self._read_replay() or replaced:
                self._db.execute("DELETE FROM groups WHERE step IS NULL")
                for row in self._waiting:
                    known = self._db.execute("SELECT 1 FROM groups WHERE id = :id", row)
                    if not known.fetchone():
                        self._db.execute(_INSERT, row)

    def _insert(self, rows: list["_Row"], prompts: dict[str, str]) -> None:
        if self._waiting:
            self._db.executemany("DELETE FROM groups WHERE id = :id AND step IS NULL", rows)
        self._db.executemany(_INSERT, rows)
        new = [
            (key, text[:_EXCERPT_CHARS], text.casefold())
            for key, text in prompts.items()
            if key not in self._prompts
        ]
        self._db.executemany("INSERT INTO prompts VALUES (?, ?, ?)", new)
        self._prompts.update(prompts)

    def _read_replay(self) -> bool:
        """Queries the replay-buffer at most every few seconds; returns whether it did."""
        if self._replay is None or time.monotonic() - self._asked_at < _REPLAY_EVERY_S:
            return False
        problem = ""
        listing: list[dict[str, Any]] = []
        prefixes: tuple[str, ...] = ()
        try:
            listing = self._replay.listing()
            if listing:
                prefixes = tuple(f"{run_id}-" for run_id in run_ids(self._run_dir))
            if listing and not prefixes:
                problem = (
                    f"{ATTEMPTS} is missing, so it is not known which of them belong to this run"
                )
        except ServiceError as error:
            listing = []
            problem = error.message
        except OSError as error:
            listing = []
            problem = str(error)
        self._replay_problem = f"waiting groups are not shown: {problem}" if problem else ""
        self._asked_at = time.monotonic()
        # A shared store has the groups of other runs too.
        own = [row for row in listing if row["id"].startswith(prefixes)]
        self._waiting = list(map(_waiting_row, own))
        return True


def _where(query: Query) -> tuple[str, list[Any]]:
    terms = ["1"]
    values: list[Any] = []
    bounds = {
        "step >= ?": query.step_from,
        "step <= ?": query.step_to,
        "reward >= ?": query.reward_min,
        "reward <= ?": query.reward_max,
        "tokens >= ?": query.length_min,
        "tokens <= ?": query.length_max,
    }
    for term, bound in bounds.items():
        if bound is not None:
            terms.append(term)
            values.append(bound)
    if query.text:
        terms.append(
            "(instr(folded, ?) OR prompt_id = ? OR id = ? "
            "OR (step, place) IN (SELECT step, place FROM hits))"
        )
        values += [query.text.casefold(), query.text, query.text]
    if query.error == "none":
        terms.append("marks IN ('|', '|reused|')")
    elif query.error == "any":
        endings = " OR ".join(f"instr(marks, '|{mark}|')" for mark in _ENDINGS)
        terms.append(f"(reason IS NOT NULL OR {endings})")
    elif query.error:
        terms.append("instr(marks, ?)")
        values.append(f"|{query.error}|")
    return " AND ".join(terms), values


def _line_rows(line: dict[str, Any]) -> Iterator[tuple[_Row, dict[str, str]]]:
    """Yields the rows of a line, each with its prompt by id; skips malformed entries."""
    step = _whole(line.get("step"))
    if step is None:
        return
    entries = [*_items(line.get("groups")), *_items(line.get("dropped"))]
    for place, entry in enumerate(entries):
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            prompt_id = _text(entry.get("prompt_id"))
            prompt = _text(entry.get("prompt"))
            prompts = {} if prompt_id is None or prompt is None else {prompt_id: prompt}
            yield _line_row(step, place, entry), prompts


def _line_row(step: int, place: int, entry: dict[str, Any]) -> _Row:
    versions = _items(entry.get("versions"))
    lengths = list(map(_whole, _items(entry.get("tokens"))))
    known_lengths = [length for length in lengths if length is not None]
    rewards = list(map(_number, _items(entry.get("rewards"))))
    cause = _text(entry.get("reason"))
    reused = bool(entry.get("reused"))

    marks = list(filter(None, map(_text, _items(entry.get("marks")))))
    if reused:
        marks.append("reused")
    if cause:
        marks += ["dropped", cause]
    return {
        "step": step,
        "place": place,
        "id": entry["id"],
        "prompt_id": _text(entry.get("prompt_id")),
        "position": _whole(entry.get("position")),
        "oldest": _whole(versions[0]) if versions else None,
        "newest": _whole(versions[-1]) if versions else None,
        "reward": _number(entry.get("reward")),
        "rewards": _packed(rewards),
        "correct": _whole(entry.get("correct")),
        "completions": len(lengths) if "tokens" in entry else None,
        "tokens": max(known_lengths, default=None),
        "lengths": _packed(known_lengths),
        "advantage": _number(entry.get("advantage")),
        "delta": _number(entry.get("delta")),
        "marks": _marked(marks),
        "reused": reused,
        "reason": cause or None,
        "detail": _text(entry.get("detail")) or None,
    }


def _waiting_row(group: dict[str, Any]) -> _Row:
    """Returns the row of a group in the replay-buffer's listing."""
    row: _Row = dict.fromkeys(_COLUMNS)
    row["id"] = group["id"]
    row["prompt_id"] = group["prompt_id"]
    row["position"] = group["position"]
    row["oldest"] = group["version"]
    row["reward"] = group["mean_reward"]
    row["rewards"] = "[]"
    row["correct"] = group["correct"]
    row["completions"] = group["completions"]
    row["lengths"] = "[]"
    row["marks"] = _marked(["waiting"])
    row["reused"] = False
    return row


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    """Converts a row to the response's format: lists and booleans instead of text and numbers."""
    shown = dict(row)
    for name in ("rewards", "lengths"):
        shown[name] = orjson.loads(shown[name])
    shown["marks"] = [mark for mark in shown["marks"].split("|") if mark]
    shown["reused"] = bool(shown["reused"])
    return shown


def _packed(numbers: list[Any]) -> str:
    return orjson.dumps(numbers).decode()


def _marked(marks: Iterable[str]) -> str:
    return "|" + "".join(f"{mark}|" for mark in marks)


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e300 else None


def _whole(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if abs(value) < 2**53 else None
