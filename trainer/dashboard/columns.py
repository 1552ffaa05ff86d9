"""The numbers of a run by name, one row per step, and their reduction to the points of a chart."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_COLUMNS = 500
"""Maximum number of columns, far above what any version writes; others are dropped."""
TOKENS = "tokens_total"
"""Column of the total trained tokens since the start."""


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line of `metrics.jsonl`; `{"update": {"loss": 1}}` becomes
    `update.loss`.

    Adds the totals `seconds` and `dropped`, `tokens_per_s` (trained tokens over the whole step),
    `alarms` (their number) and `alarm.NAME` (1) for each.
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict) and name not in ("alarms", "hints"):
            for part, item in value.items():
                if _is_number(item):
                    found[f"{name}.{part}"] = float(item)
        elif _is_number(value) and name != "step":
            found[name] = float(value)
    for total in ("seconds", "dropped"):
        if isinstance(line.get(total), dict):
            parts = [value for name, value in found.items() if name.startswith(f"{total}.")]
            found[total] = sum(parts)
    if found.get("seconds", 0.0) > 0 and "update.trained_tokens" in found:
        found["tokens_per_s"] = found["update.trained_tokens"] / found["seconds"]
    alarms = line.get("alarms")
    if isinstance(alarms, dict):
        found["alarms"] = float(len(alarms))
        for name in alarms:
            found[f"alarm.{name}"] = 1.0
    return found


def notes(line: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns the alarms and hints of a step, each with `kind` and `text`."""
    found = []
    for kind in ("alarm", "hint"):
        content = line.get(f"{kind}s")
        texts: list[Any] = []
        if isinstance(content, dict):
            texts = list(content.values())
        elif isinstance(content, list):
            texts = content
        found += [{"kind": kind, "text": text} for text in texts if isinstance(text, str)]
    return found


def _is_number(value: object) -> bool:
    """Returns whether a value is a finite number in the range of float32, the type of the
    response.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38


class Columns:
    """Rows in step order; a missing number is NaN."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, row: Mapping[str, float]) -> bool:
        """Appends a row after removing an earlier attempt's rows from this step on; returns whether
        there were any.
        """
        keep = bisect_left(self.steps, step)
        undone = keep < len(self.steps)
        if undone:
            del self.steps[keep:]
            for column in self._columns.values():
                del column[keep:]
        for name in row:
            if name not in self._columns and len(self._columns) < MAX_COLUMNS:
                self._columns[name] = array("d", [math.nan] * len(self.steps))
        self.steps.append(step)
        for name, column in self._columns.items():
            column.append(row.get(name, math.nan))
        return undone

    def column(self, name: str) -> NDArray[np.float64]:
        """Returns a column, [rows]; all NaN for an unknown name."""
        if name not in self._columns:
            return np.full(len(self), math.nan)
        return np.array(self._columns[name], np.float64)

    def last(self, name: str, steps: int = 1) -> float | None:
        """Returns the mean of the newest `steps` rows; None without a number."""
        values = self.column(name)[-steps:]
        return float(np.nanmean(values)) if np.isfinite(values).any() else None

    def before(self, step: int, name: str) -> float | None:
        """Returns the value in the last row before a step; None if there is none."""
        row = bisect_left(self.steps, step) - 1
        value = self._columns[name][row] if row >= 0 and name in self._columns else math.nan
        return None if math.isnan(value) else value

    def csv(self) -> str:
        """Returns all rows as CSV, a column for each name, in order of names; a missing number is
        empty.
        """
        names = sorted(self._columns)
        lines = [",".join(["step", *(_quoted(name) for name in names)])]
        columns = [self._columns[name] for name in names]
        for step, *values in zip(self.steps, *columns, strict=True):
            cells = ["" if math.isnan(value) else repr(value) for value in values]
            lines.append(",".join([str(step), *cells]))
        return "\r\n".join(lines) + "\r\n"

    def rows(self, first: int, last: int) -> slice:
        """Returns the rows of the steps from `first` to `last`, inclusive."""
        return slice(bisect_left(self.steps, first), bisect_right(self.steps, last))

    def thinned(self, rows: slice, points: int) -> dict[str, Any]:
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
        result: dict[str, Any] = {
            "steps": steps[ends],
            "times": self.column("time")[rows][ends],
            "columns": {},
        }
        if merged:
            result |= {"low": {}, "high": {}}
        for name in self._columns:
            if name == "time":
                continue
            values = np.array(self._columns[name][rows], np.float64)
            if not merged:
                result["columns"][name] = values.astype(np.float32)
                continue
            known = ~np.isnan(values)
            sums = np.add.reduceat(np.where(known, values, 0.0), starts)
            counts = np.add.reduceat(known.astype(float), starts)
            with np.errstate(invalid="ignore"):
                means = sums / counts
            shown = values[ends] if name == TOKENS else means
            low = np.fmin.reduceat(values, starts)
            high = np.fmax.reduceat(values, starts)
            result["columns"][name] = shown.astype(np.float32)
            result["low"][name] = low.astype(np.float32)
            result["high"][name] = high.astype(np.float32)
        return result


def _quoted(name: str) -> str:
    """Returns a name as a cell that no spreadsheet interprets as a formula."""
    name = f"'{name}" if name[:1] in "=+-@\t\r" else name
    return '"' + name.replace('"', '""') + '"' if any(sign in name for sign in ',"\r\n') else name
