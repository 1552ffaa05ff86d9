"""What a run recorded, read once for `rlhf why`: numbers, groups, texts and settings. No torch."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from common import Json
from trainer.dashboard.columns import step_numbers
from trainer.observe.group_files import LINES, GroupSummary, GroupTexts, StepGroups, read_texts
from trainer.observe.jsonl import JsonlReader, parsed
from trainer.observe.run_dir import AUDIT, changed, known_settings
from trainer.trackers.base import flatten

_WINDOW = 5
"""Steps before a jump and after it whose means are compared."""
_LEAST_NOISE = 0.02
_LEAST_SHARE = 0.5
"""Of a number's range over the run: noise that is taken for granted; what a jump must be."""


@dataclass(frozen=True)
class Jump:
    """The largest change of a number between two steps."""

    metric: str
    step: int
    """The first step after it."""
    before: float
    after: float
    size: float
    """In mean differences of neighbouring steps."""

    @property
    def text(self) -> str:
        """The jump in words."""
        verb = "rises" if self.after > self.before else "falls"
        numbers = f"from {self.before:.3g} to {self.after:.3g}"
        return f"{self.metric} {verb} {numbers} at step {self.step}"


@dataclass
class RunFacts:
    """The record of a run."""

    directory: Path
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step, as the dashboard names them: `update.loss`."""
    groups: dict[int, list[GroupSummary]] = field(default_factory=dict)
    """By step: those that were trained on."""
    settings: list[tuple[int, Json]] = field(default_factory=list)
    """The settings of each attempt by name, and the step that it continued after."""

    @classmethod
    def read(cls, run_dir: Path) -> "RunFacts":
        """Reads the files; damaged lines are left out."""
        facts = cls(run_dir)
        for line in JsonlReader(run_dir / "metrics.jsonl", parsed).read():
            step = line.get("step")
            if isinstance(step, int):
                facts.numbers[step] = step_numbers(line)
        decode = msgspec.json.Decoder(StepGroups).decode
        for each in JsonlReader(run_dir / LINES, decode).read():
            facts.groups[each.step] = each.groups
        # Only the audit keeps the settings of earlier attempts.
        for start in JsonlReader(run_dir / AUDIT, parsed).read():
            if start.get("kind") == "start":
                facts.settings.append((start["step"], flatten(start["config"])))
        if not facts.settings:
            facts.settings.append((0, known_settings(run_dir)))
        return facts

    @property
    def steps(self) -> list[int]:
        """The recorded steps in order."""
        return sorted(self.numbers)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Returns the known values of a number by step."""
        return [
            (step, self.numbers[step][metric])
            for step in self.steps
            if metric in self.numbers[step]
        ]

    def setting(self, name: str, step: int) -> Any:
        """Returns a setting as it was when `step` was made."""
        values = [config.get(name) for after, config in self.settings if after < step]
        return values[-1] if values else None

    def changes(self) -> Iterator[tuple[int, Json, Json]]:
        """Yields the settings that an attempt changed: the first step with them, before, after."""
        for (_, before), (after, now) in itertools.pairwise(self.settings):
            new = changed(before, now)
            if new:
                yield after + 1, before, new

    @cached_property
    def texts(self) -> Callable[[int], list[GroupTexts]]:
        """Returns the texts of a step's groups that were trained on."""
        known: dict[int, list[GroupTexts]] = {}

        def of_step(step: int) -> list[GroupTexts]:
            if step not in known:
                found = read_texts(self.directory, step)
                known[step] = [group for group in found if group.id and not group.reason]
            return known[step]

        return of_step

    def jump(self, metric: str, at: int | None = None) -> Jump | None:
        """Returns the largest jump of a number, or that at a step; None where it does not jump."""
        series = self.series(metric)
        values = [value for _, value in series]
        if len(values) < 4:
            return None
        # Without the largest one, which may be the jump itself.
        apart = sorted(abs(b - a) for a, b in itertools.pairwise(values))[:-1]
        noise = max(fmean(apart), _LEAST_NOISE * (max(values) - min(values)), 1e-12)
        found: list[Jump] = []
        # Two steps on each side: one alone may be an outlier.
        for place in range(2, len(values) - 1):
            step = series[place][0]
            if at not in (None, step):
                continue
            before = fmean(values[max(0, place - _WINDOW) : place])
            after = fmean(values[place : place + _WINDOW])
            change = abs(after - before)
            if at is not None or change >= _LEAST_SHARE * (max(values) - min(values)):
                found.append(Jump(metric, step, before, after, size=change / noise))
        return max(found, key=lambda jump: jump.size, default=None)


def first_above(series: Sequence[tuple[int, float]], bound: float) -> int | None:
    """Returns the first step of a series whose value is at least `bound`."""
    return next((step for step, value in series if value >= bound), None)
