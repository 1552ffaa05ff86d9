"""Difficulty-aware sampling: prompts with a pass rate near the target are drawn more often, but all
keep being drawn.

The first pass hands out every prompt once, in the order of the plain stream, since no pass rate is
known yet. After that each position is drawn: with probability `free_share` the next prompt of the
plain stream, otherwise a prompt by its pass rate.

A draw is a function of the seed, the position, the draws before it, and the pass rates reported
before it. Draws and reports are stored with the cursor, in one transaction. A seek back forgets the
draws from there on and the reports made later, so the stream continues as it was at that time.
"""

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidInput
from common.wire.schemas import Wire
from services.http.sqlite_store import sealed, unsealed

Float64 = NDArray[np.float64]
_STREAM = 1  # distinguishes these random numbers from those of the plain order
SCHEMA = """
CREATE TABLE curriculum (rewinds INTEGER NOT NULL) STRICT;
CREATE TABLE draws (
    position INTEGER PRIMARY KEY,
    place INTEGER NOT NULL,
    free INTEGER NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
CREATE TABLE reports (
    serial INTEGER PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    position INTEGER NOT NULL,
    body TEXT NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
INSERT INTO curriculum VALUES (0);
"""


@dataclass(frozen=True)
class Difficulty:
    """Parameters of `data.curriculum difficulty`."""

    target: float = 0.5
    """The preferred pass rate."""
    free_share: float = 0.2
    """Share of draws that continue the plain stream, regardless of pass rates."""
    smoothing: float = 0.5
    """Weight of a prompt's previous pass rate when a new one is reported."""


class CurriculumStats(Wire):
    """Pass rates known, and prompts drawn so far."""

    known: int
    """Problems with a pass rate."""
    mean_pass_rate: float | None = None
    """Mean of the known pass rates; absent when there are none."""
    drawn_freely: int
    drawn_by_difficulty: int


def weight_of_pass_rate(rates: Float64, target: float) -> Float64:
    """Returns the weight [N] of prompts with these pass rates: (p/t)^2t · ((1−p)/(1−t))^2(1−t), and
    0 where p is NaN (unknown).

    It is 1 at the target t and 0 at pass rates 0 and 1, where all completions of a group get the
    same reward and teach nothing. With a target of 0.5 it is 4·p·(1−p), the scaled variance of
    correctness.
    """
    solved = (rates / target) ** (2 * target)
    unsolved = ((1 - rates) / (1 - target)) ** (2 * (1 - target))
    return np.where(np.isnan(rates), 0.0, solved * unsolved)


def chances(weights: Float64, free_share: float) -> Float64:
    """Returns the probability [N] of each prompt: they sum to 1 − free_share, or to 0 when no
    weight is above 0.
    """
    total = weights.sum()
    return weights / total * (1 - free_share) if total > 0 else np.zeros_like(weights)


def pick(chance: Float64, number: float) -> int | None:
    """Returns the prompt selected by a number in [0, 1), or None for the rest of the interval: a
    free draw.
    """
    limits = np.cumsum(chance)
    return int(np.searchsorted(limits, number, side="right")) if number < limits[-1] else None


def uniform(seed: int, position: int) -> float:
    """Returns the random number in [0, 1) for a position, from the raw stream of PCG64, which numpy
    never changes.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_STREAM, position)))
    return float(int(bits.random_raw()) >> 11) * 2.0**-53


class Curriculum:
    """Draws prompts by difficulty. Not thread-safe: every call must be inside a transaction of
    `PromptStream`.

    It caches the tables, which several processes may share. `plain` returns the n-th prompt of the
    plain stream.
    """

    def __init__(
        self, size: int, seed: int, settings: Difficulty, plain: Callable[[int], int]
    ) -> None:
        self.size = size
        self.seed = seed
        self.settings = settings
        self._plain = plain
        self.forget()

    def forget(self) -> None:
        """Drops the cache, after a transaction that was rolled back."""
        self._rewinds = -1
        self._next = 0
        self._serial = 0
        self._free = 0
        self._by_difficulty = 0
        self._rates = np.full(self.size, np.nan)
        self._drawn_at = np.full(self.size, -1, np.int64)
        self._reported_at = np.zeros(self.size, np.int64)

    def draw(self, db: sqlite3.Connection, position: int, count: int) -> None:
        """Draws the prompts for these positions, which must not have any yet."""
        self._read(db)
        weights = weight_of_pass_rate(self._rates, self.settings.target)
        drawn = []
        for at in range(position, position + count):
            place = self._by_weight(weights, at) if self._free >= self.size else None
            free = place is None
            if place is None:
                place = self._plain(self._free)
            drawn.append(sealed((at, place, int(free))))
            self._add_draw(at, place, free)
        db.executemany("INSERT INTO draws VALUES (?, ?, ?, ?)", drawn)

    @staticmethod
    def places(db: sqlite3.Connection, position: int, count: int) -> list[int]:
        """Returns the prompts that were drawn for these positions."""
        drawn = _draws(db, "position >= ? AND position < ?", position, position + count)
        return [place for _, place, _ in drawn]

    def report(
        self,
        db: sqlite3.Connection,
        request_id: str,
        pass_rates: Sequence[tuple[int, float]],
        position: int,
    ) -> None:
        """Stores pass rates by place, known from `position` on; repeating the request changes
        nothing.

        Raises InvalidInput when the id was used for other pass rates.
        """
        body = json.dumps(pass_rates)
        stored = db.execute(
            "SELECT body FROM reports WHERE request_id = ?", (request_id,)
        ).fetchone()
        if stored is None:
            db.execute(
                "INSERT INTO reports (request_id, position, body, seal) VALUES (?, ?, ?, ?)",
                sealed((request_id, position, body)),
            )
        elif stored[0] != body:
            raise InvalidInput(
                "the request_id was used for other pass rates",
                field="request_id",
                value=request_id,
                remedy="repeat that request unchanged, or use a new request_id",
            )

    @staticmethod
    def rewind(db: sqlite3.Connection, position: int) -> None:
        """Forgets the draws and reports made after the stream was at `position`."""
        db.execute("DELETE FROM draws WHERE position >= ?", (position,))
        db.execute("DELETE FROM reports WHERE position > ?", (position,))
        db.execute("UPDATE curriculum SET rewinds = rewinds + 1")

    def stats(self, db: sqlite3.Connection) -> CurriculumStats:
        self._read(db)
        rates = self._rates[~np.isnan(self._rates)]
        return CurriculumStats(
            known=len(rates),
            mean_pass_rate=float(rates.mean()) if len(rates) else None,
            drawn_freely=self._free,
            drawn_by_difficulty=self._by_difficulty,
        )

    def _by_weight(self, weights: Float64, position: int) -> int | None:
        """Returns the prompt drawn by its pass rate, or None for a free draw.

        A drawn prompt is not drawn again until its pass rate is reported or N more draws were made,
        as its group may have been dropped.
        """
        out = (self._drawn_at >= self._reported_at) & (position - self._drawn_at < self.size)
        probabilities = chances(np.where(out, 0.0, weights), self.settings.free_share)
        return pick(probabilities, uniform(self.seed, position))

    def _read(self, db: sqlite3.Connection) -> None:
        """Updates the cache from the tables."""
        ((rewinds,),) = db.execute("SELECT rewinds FROM curriculum")
        if rewinds != self._rewinds:
            self.forget()
            self._rewinds = rewinds
        for at, place, free in _draws(db, "position >= ?", self._next):
            self._add_draw(at, place, bool(free))
        new = "SELECT serial, request_id, position, body, seal FROM reports WHERE serial > ?"
        for serial, *row in db.execute(f"{new} ORDER BY serial", (self._serial,)):
            _, position, body = unsealed(row, f"the report {row[0]}")
            self._serial = serial
            for place, rate in json.loads(body):
                before = self._rates[place]
                if not np.isnan(before):
                    kept = self.settings.smoothing
                    rate = kept * before + (1 - kept) * rate
                self._rates[place] = rate
                self._reported_at[place] = position

    def _add_draw(self, position: int, place: int, free: bool) -> None:
        self._next = position + 1
        self._drawn_at[place] = position
        self._free += free
        self._by_difficulty += not free


def _draws(db: sqlite3.Connection, condition: str, *values: int) -> list[tuple[int, int, int]]:
    """Returns (position, place, free) of the draws that meet an SQL condition, in order. Raises
    Damaged.
    """
    query = f"SELECT position, place, free, seal FROM draws WHERE {condition} ORDER BY position"  # noqa: S608
    found = []
    for row in db.execute(query, values):
        position, place, free = unsealed(row, f"the draw at position {row[0]}")
        found.append((position, place, free))
    return found
