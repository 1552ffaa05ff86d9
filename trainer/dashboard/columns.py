"""The numbers of a run by name, one row per step, and their reduction to the points of a chart."""

import csv
import io
import math
from array import array
from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from common import Json
from trainer.trackers.base import Numbers, Record, numbers

MAX_COLUMNS = 500
"""Maximum number of columns, far above what any version writes; others are dropped."""
TOKENS = "tokens_total"
"""Column of the total trained tokens since the start."""


def step_numbers(line: Record) -> Numbers:
    """Returns the numbers of a line of `metrics.jsonl`; `{"update": {"loss": 1}}` becomes
    `update.loss`.

    Adds the totals `seconds`, `dropped` and `lost_episodes`, `tokens_per_s` (trained tokens over
    the whole step), `alarms` (their number) and `alarm.NAME` (1) for each.
    """
    found = numbers(line)
    found.pop("step", None)
    for total in ("seconds", "dropped", "lost_episodes"):
        if isinstance(line.get(total), dict):
            found[total] = sum(numbers(line[total]).values())
    tokens = found.get("update.trained_tokens", 0.0)
    # Without either, the rate is not known.
    if tokens > 0 and found.get("seconds", 0.0) > 0:
        found["tokens_per_s"] = tokens / found["seconds"]
    alarms = line.get("alarms")
    if isinstance(alarms, dict):
        found["alarms"] = float(len(alarms))
        found |= {f"alarm.{name}": 1.0 for name in alarms}
    return found


class Columns:
    """Rows in step order; a missing number is NaN."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.notes: dict[int, list[dict[str, str]]] = {}
        """Alarms and hints by step, each with `kind` and `text`."""
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, line: Record) -> None:
        """Appends the row of a line after removing an earlier attempt's rows from this step on."""
        row = step_numbers(line)
        kept = bisect_left(self.steps, step)
        for undone in self.steps[kept:]:
            self.notes.pop(undone, None)
        del self.steps[kept:]
        self.steps.append(step)
        for name in row:
            if name not in self._columns and len(self._columns) < MAX_COLUMNS:
                self._columns[name] = array("d", [math.nan] * kept)
        for name, column in self._columns.items():
            column[kept:] = array("d", [row.get(name, math.nan)])
        for kind in ("alarm", "hint"):
            texts = line.get(f"{kind}s")
            for text in texts.values() if isinstance(texts, dict) else ():
                self.notes.setdefault(step, []).append({"kind": kind, "text": str(text)})

    @property
    def names(self) -> list[str]:
        """The names of the columns in order."""
        return sorted(self._columns)

    def column(self, name: str) -> NDArray[np.float64]:
        """Returns a column, [rows]; all NaN for an unknown name."""
        if name not in self._columns:
            return np.full(len(self), math.nan)
        return np.array(self._columns[name], np.float64)

    def row(self, step: int) -> Numbers:
        """Returns the numbers of a step; empty when there is no such step."""
        place = bisect_left(self.steps, step)
        if place == len(self) or self.steps[place] != step:
            return {}
        columns = self._columns.items()
        return {name: column[place] for name, column in columns if not math.isnan(column[place])}

    def last(self, name: str, steps: int = 1) -> float | None:
        """Returns the mean of the newest `steps` rows; None without a number."""
        values = self.column(name)[-steps:]
        return float(np.nanmean(values)) if np.isfinite(values).any() else None

    def csv(self) -> str:
        """Returns all rows as CSV, a column for each name, in order of names; a missing number is
        empty.
        """
        names = self.names
        file = io.StringIO()
        writer = csv.writer(file)
        # A spreadsheet would interpret a name such as `=1+1` as a formula.
        shown = [f"'{name}" if name[:1] in "=+-@\t\r" else name for name in names]
        writer.writerow(["step", *shown])
        columns = [self._columns[name] for name in names]
        for step, *values in zip(self.steps, *columns, strict=True):
            writer.writerow([step, *("" if math.isnan(value) else value for value in values)])
        return file.getvalue()

    def rows(self, first: int, last: int) -> slice:
        """Returns the rows of the steps from `first` to `last`, inclusive."""
        return slice(bisect_left(self.steps, first), bisect_right(self.steps, last))

    def thinned(self, rows: slice, points: int) -> Json:
        """Merges rows into at most `points` means of consecutive rows, each at its last step.

        Returns `steps`, `times` (seconds since 1970), `columns` (means by name), and for merged
        rows `low` and `high` (minima and maxima by name), so that a spike of one step stays
        visible.
        """
        steps = np.array(self.steps[rows], np.int64)
        edges = np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(np.int64)
        starts = edges[:-1]
        ends = edges[1:] - 1
        merged = len(starts) < len(steps)
        result: Json = {
            "steps": steps[ends],
            "times": self.column("time")[rows][ends],
            "columns": {},
        }
        if merged:
            result |= {"low": {}, "high": {}}
        for name in self._columns.keys() - {"time"}:
            values = self.column(name)[rows]
            shown = values
            if merged:
                counts = np.add.reduceat(np.isfinite(values).astype(float), starts)
                with np.errstate(invalid="ignore"):
                    shown = np.add.reduceat(np.nan_to_num(values), starts) / counts
                result["low"][name] = np.fmin.reduceat(values, starts).astype(np.float32)
                result["high"][name] = np.fmax.reduceat(values, starts).astype(np.float32)
            result["columns"][name] = shown.astype(np.float32)
        total = np.nan_to_num(self.column("update.trained_tokens")).cumsum()
        result["columns"][TOKENS] = total[rows][ends].astype(np.float32)
        return result
