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
    step INTEGER, place INTEGER, id TEXT NOT NULL, prompt_id TEXT, position INTEGER, oldest INTEGER, newest INTEGER,
    reward REAL, rewards TEXT, correct INTEGER, completions INTEGER, tokens INTEGER, lengths TEXT, advantage REAL, delta REAL,
    marks TEXT NOT NULL, reused INTEGER, reason TEXT, detail TEXT
);
CREATE INDEX by_id ON groups (id, step);
CREATE INDEX by_prompt ON groups (prompt_id, step);
CREATE TABLE hits (step INTEGER, place INTEGER, PRIMARY KEY (step, place)) WITHOUT ROWID;
CREATE TABLE prompts (prompt_id TEXT PRIMARY KEY, excerpt TEXT NOT NULL, folded TEXT NOT NULL) WITHOUT ROWID;
"""
_INSERT = f"INSERT INTO groups VALUES ({', '.join('?' * 19)})"  # noqa: S608
_SHOWN = (
    "step, place, id, prompt_id, excerpt AS prompt, position, oldest, newest, reward, rewards, correct, completions, tokens, "
    "lengths, advantage, delta, marks, reused, reason, detail"
)
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
        self._replay, self._lock, self._run_dir = replay, threading.Lock(), run_dir
        self._lines = JsonlReader(run_dir / LINES)
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.executescript(_SCHEMA)
        self._prompts: set[str] = set()
        """Ids of the prompts whose text is stored."""
        self._left: dict[str, int] | None = None
        self._asked = -_REPLAY_EVERY_S
        self._stored: list[tuple[Any, ...]] = []
        """A row for each waiting group."""
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
        column, down = (
            query.sort.removeprefix("-").replace("length", "tokens"),
            query.sort.startswith("-"),
        )
        nulls = (
            "FIRST" if query.sort == "-step" else "LAST"
        )  # groups that wait have no step: they are the newest
        order = f"{column} {'DESC' if down else 'ASC'} NULLS {nulls}, step DESC, place"
        with self._lock:
            self._refresh(patience_s)
            if query.text:
                self._db.execute("DELETE FROM hits")
                self._db.executemany("INSERT INTO hits VALUES (?, ?)", hits)
            (total,) = self._db.execute(
                f"SELECT COUNT(*) {source} WHERE {where}", values
            ).fetchone()
            if around is not None:
                numbered = f"SELECT id, step, ROW_NUMBER() OVER (ORDER BY {order}) AS number {source} WHERE {where}"
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
        query = f"SELECT {_SHOWN} {_FROM} WHERE id = ?1 AND (step = ?2 OR ?2 IS NULL) ORDER BY step DESC LIMIT 1"
        with self._lock:
            self._refresh()
            row = self._db.execute(query, (group_id, step)).fetchone()
        return None if row is None else _shown(row)

    def of_prompt(self, prompt_id: str, limit: int) -> list[dict[str, Any]]:
        query = f"SELECT {_SHOWN} {_FROM} WHERE prompt_id = ? ORDER BY step DESC NULLS FIRST, place DESC LIMIT ?"
        with self._lock:
            self._refresh()
            rows = self._db.execute(query, (prompt_id, limit)).fetchall()
        return [_shown(row) for row in reversed(rows)]

    def problems(self) -> list[str]:
        """Returns a sentence for each missing or damaged part."""
        with self._lock:
            lines = self._lines
            missing = (
                []
                if lines.path.exists()
                else [f"{LINES} is missing: which groups a step trained on is not known"]
            )
            return (
                lines.problems()
                + missing
                + ([self._replay_problem] if self._replay_problem else [])
            )

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
            if replaced := self._lines.replaced():
                self._db.execute("DELETE FROM groups")
            rows: list[tuple[Any, ...]] = []
            prompts: dict[str, str] = {}
            self._left = None
            for _, line in self._lines.read(_NEWEST_BYTES):
                for row, prompt in _line_rows(line):
                    rows.append(row)
                    prompts |= prompt
                if len(rows) >= _ROWS_AT_ONCE:
                    self._insert(rows, prompts)
                    rows, prompts = [], {}
                    if time.monotonic() > end:
                        self._left = {
                            "done": self._lines.done,
                            "of": self._lines.path.stat().st_size,
                        }
                        break
            self._insert(rows, prompts)
            if self._read_replay() or replaced:
                self._db.execute("DELETE FROM groups WHERE step IS NULL")
                known = "SELECT 1 FROM groups WHERE id = ?"
                new = [
                    row for row in self._stored if not self._db.execute(known, (row[2],)).fetchone()
                ]
                self._db.executemany(_INSERT, new)

    def _insert(self, rows: list[tuple[Any, ...]], prompts: dict[str, str]) -> None:
        if self._stored:
            self._db.executemany(
                "DELETE FROM groups WHERE id = ? AND step IS NULL", [(row[2],) for row in rows]
            )
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
        if self._replay is None or time.monotonic() - self._asked < _REPLAY_EVERY_S:
            return False
        try:
            listing = self._replay.listing()
            own = tuple(f"{run_id}-" for run_id in run_ids(self._run_dir)) if listing else ()
            problem = (
                ""
                if own or not listing
                else f"{ATTEMPTS} is missing, so it is not known which of them belong to this run"
            )
        except (ServiceError, OSError) as error:
            listing, own, problem = (
                [],
                (),
                error.message if isinstance(error, ServiceError) else str(error),
            )
        self._replay_problem = problem and f"waiting groups are not shown: {problem}"
        self._asked = time.monotonic()
        self._stored = [
            _stored_row(row) for row in listing if row["id"].startswith(own)
        ]  # a shared store has other runs' too
        return True


def _where(query: Query) -> tuple[str, list[Any]]:
    terms = ["1"]
    values: list[Any] = []
    for column, least, most in (
        ("step", query.step_from, query.step_to),
        ("reward", query.reward_min, query.reward_max),
        ("tokens", query.length_min, query.length_max),
    ):
        bounds = {f"{column} >= ?": least, f"{column} <= ?": most}
        terms += [term for term, value in bounds.items() if value is not None]
        values += [value for value in bounds.values() if value is not None]
    if query.text:
        terms.append(
            "(instr(folded, ?) OR prompt_id = ? OR id = ? OR (step, place) IN (SELECT step, place FROM hits))"
        )
        values += [query.text.casefold(), query.text, query.text]
    if query.error == "none":
        terms.append("marks IN ('|', '|reused|')")
    elif query.error == "any":
        terms.append(
            "(reason IS NOT NULL OR "
            + " OR ".join(f"instr(marks, '|{mark}|')" for mark in _ENDINGS)
            + ")"
        )
    elif query.error:
        terms.append("instr(marks, ?)")
        values.append(f"|{query.error}|")
    return " AND ".join(terms), values


def _line_rows(line: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, str]]]:
    """Yields the rows of a line, each with its prompt by id; skips malformed entries."""
    step, place = _whole(line.get("step")), 0
    if step is None:
        return
    for key in ("groups", "dropped"):
        for entry in line[key] if isinstance(line.get(key), list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                prompt_id, prompt = _text(entry.get("prompt_id")), _text(entry.get("prompt"))
                prompts = {} if prompt_id is None or prompt is None else {prompt_id: prompt}
                yield _line_row(step, place, entry, prompt_id), prompts
            place += 1


def _line_row(
    step: int, place: int, entry: dict[str, Any], prompt_id: str | None
) -> tuple[Any, ...]:
    versions, lengths, rewards = (
        _items(entry.get(name)) for name in ("versions", "tokens", "rewards")
    )
    numbers = [number for item in lengths if (number := _whole(item)) is not None]
    cause, reused = _text(entry.get("reason")), bool(entry.get("reused"))
    marks = [mark for item in _items(entry.get("marks")) if (mark := _text(item))]
    marks += ["reused"] * reused + (["dropped", cause] if cause else [])
    return (
        *(step, place, entry["id"], prompt_id, _whole(entry.get("position"))),
        *((_whole(versions[0]), _whole(versions[-1])) if versions else (None, None)),
        *(
            _number(entry.get("reward")),
            _packed([_number(item) for item in rewards]),
            _whole(entry.get("correct")),
        ),
        *(
            len(lengths) if "tokens" in entry else None,
            max(numbers, default=None),
            _packed(numbers),
        ),
        *(_number(entry.get("advantage")), _number(entry.get("delta")), _marked(marks), reused),
        *(cause or None, _text(entry.get("detail")) or None),
    )


def _stored_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        *(
            None,
            None,
            row["id"],
            row["prompt_id"],
            row["position"],
            row["version"],
            None,
            row["mean_reward"],
            "[]",
        ),
        *(
            row["correct"],
            row["completions"],
            None,
            "[]",
            None,
            None,
            _marked(["waiting"]),
            False,
            None,
            None,
        ),
    )


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
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        else None
    )


def _whole(value: object) -> int | None:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
        else None
    )
