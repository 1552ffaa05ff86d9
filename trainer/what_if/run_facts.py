"""What a run recorded, read once for `rlhf why`: numbers, groups, texts and settings. No torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common import Json
from trainer.dashboard.columns import Columns
from trainer.observe.group_files import LINES, GroupSummary, GroupTexts, StepGroups, read_texts
from trainer.observe.jsonl import JsonlReader, parsed_line
from trainer.observe.run_dir import AUDIT, changed, known_settings
from trainer.trackers.base import flatten

_WINDOW = 5
"""Steps before a jump and after it whose means are compared."""
_LEAST_NOISE = 0.02
_LEAST_SHARE = 0.5
"""Two shares of a number's range over the run: the noise that every number is taken to have, and
the least size of a jump."""


@dataclass(frozen=True)
class Jump:
    """The largest change of a number between two steps."""

    metric: str
    step: int
    """The first step after it."""
    size: float
    """In mean differences of neighbouring steps."""
    text: str
    """The jump in words."""


@dataclass
class RunFacts:
    """The record of a run."""

    directory: Path
    columns: Columns
    """Its numbers, as the dashboard names them: `update.loss`."""
    groups: dict[int, list[GroupSummary]]
    """By step: those that were trained on."""
    settings: list[tuple[int, Json]]
    """The settings of each attempt by name, and the step that it continued after."""
    _texts: dict[int, list[GroupTexts]] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> "RunFacts":
        """Reads the files; damaged lines are left out."""
        columns = Columns()
        for line in JsonlReader(run_dir / "metrics.jsonl", parsed_line).read():
            columns.append(line["step"], line)
        groups = JsonlReader(run_dir / LINES, msgspec.json.Decoder(StepGroups).decode).read()
        # Only the audit keeps the settings of earlier attempts.
        settings = [
            (line["step"], flatten(line["config"]))
            for line in JsonlReader(run_dir / AUDIT, parsed_line).read()
            if line.get("kind") == "start"
        ]
        settings = settings or [(0, known_settings(run_dir))]
        return cls(run_dir, columns, {line.step: line.groups for line in groups}, settings)

    @property
    def steps(self) -> Sequence[int]:
        """The recorded steps in order."""
        return self.columns.steps

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Returns the known values of a number by step."""
        values = self.columns.column(metric).tolist()
        return [pair for pair in zip(self.steps, values, strict=True) if isfinite(pair[1])]

    def setting(self, name: str, step: int) -> Any:
        """Returns a setting as it was when `step` was made."""
        values = [config.get(name) for after, config in self.settings if after < step]
        return values[-1] if values else None

    def changes(self) -> list[tuple[int, str]]:
        """Returns the settings that an attempt changed, with the first step with them, in words."""
        return [
            (after + 1, f"{name} {before.get(name)} → {value}")
            for (_, before), (after, now) in itertools.pairwise(self.settings)
            for name, value in changed(before, now).items()
        ]

    def texts(self, step: int) -> list[GroupTexts]:
        """Returns the texts of a step's groups that were trained on."""
        if step not in self._texts:
            self._texts[step] = [
                group for group in read_texts(self.directory, step) if group.id and not group.reason
            ]
        return self._texts[step]

    def jump(self, metric: str) -> Jump | None:
        """Returns the largest jump of a number; None where it does not jump."""
        series = self.series(metric)
        values = np.array([value for _, value in series])
        if len(values) < 4 or np.ptp(values) == 0.0:
            return None
        # Two steps on each side: one alone may be an outlier.
        sides = {
            place: (
                values[max(0, place - _WINDOW) : place].mean(),
                values[place : place + _WINDOW].mean(),
            )
            for place in range(2, len(values) - 1)
        }
        place, (before, after) = max(sides.items(), key=lambda item: abs(item[1][1] - item[1][0]))
        change = abs(after - before)
        if change < _LEAST_SHARE * np.ptp(values):
            return None
        # Without the largest one, which may be the jump itself.
        noise = np.sort(np.abs(np.diff(values)))[:-1].mean()
        step = series[place][0]
        verb = "rises" if after > before else "falls"
        text = f"{metric} {verb} from {before:.3g} to {after:.3g} at step {step}"
        return Jump(metric, step, change / max(noise, _LEAST_NOISE * np.ptp(values)), text)
