"""The recorded figures of the history gate, and the bands that follow from them.

`benchmarks/history/ARM.jsonl` has a line for every recorded run of an arm: its figures, commit,
date, machine and seed. The band of a figure is the mean ± the larger of four standard deviations
and a floor: a few lines say little about the spread, and rounding differs between machines.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

HISTORY = Path(__file__).parent / "history"
DEVIATIONS = 4.0
MIN_LINES = 5
"""Fewer lines make no band."""
Figures = Mapping[str, float]
Machine = Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    """How a figure is judged."""

    text: str
    fails: Literal["below", "above", "both"]
    """On which side of its band a figure fails."""
    floor: float = 0.0
    """Smallest half width of the band."""
    relative_floor: float = 0.0
    """The same, as a share of the mean."""
    of_machine: bool = False
    """Whether only lines of the same kind of machine count."""


RULES = {
    "accuracy": Rule("held-out accuracy at the end", "below", floor=0.06),
    "reward": Rule("mean reward, last quarter of the steps", "below", floor=0.06),
    "delta_logprob": Rule("largest |Δ logprob| of engine and trainer", "above", floor=1e-5),
    "loss": Rule("mean |loss|", "both", relative_floor=0.5),
    "grad_norm": Rule("mean gradient norm", "both", relative_floor=0.35),
    "entropy": Rule("entropy, last quarter", "both", relative_floor=0.5),
    "value_loss": Rule("value loss, last quarter", "above", relative_floor=0.5),
    "dropped": Rule("dropped groups and skipped updates", "above", floor=0.5),
    "cpu": Rule(
        "processor time of a step, in references", "above", relative_floor=0.12, of_machine=True
    ),
    "update": Rule(
        "time of an update, in references", "above", relative_floor=0.1, of_machine=True
    ),
}


@dataclass(frozen=True)
class Line:
    """A recorded run of an arm."""

    commit: str
    date: str
    seed: int
    machine: Machine
    figures: Figures


@dataclass(frozen=True)
class Band:
    """The range in which a figure is expected."""

    low: float
    high: float
    lines: int


@dataclass(frozen=True)
class Verdict:
    """A figure of this commit beside its band; `band` is None if there are too few lines."""

    arm: str
    name: str
    value: float
    band: Band | None

    @property
    def fails(self) -> bool:
        """Whether the figure is outside its band, on a side that counts, or no number."""
        if not math.isfinite(self.value):
            return True
        if self.band is None:
            return False
        return not self.band.low <= self.value <= self.band.high

    @property
    def sentence(self) -> str:
        """What is wrong with it, and what to do."""
        text = f"{self.arm}: {RULES[self.name].text} is {self.value:.4g}"
        if self.band is None:
            return f"{text}, which is no figure"
        return (
            f"{text}, outside of {self.band.low:.4g} … {self.band.high:.4g} ({self.band.lines} "
            "recorded runs): find out why, or record it if the change is meant (python -m "
            "benchmarks.gate --record)"
        )

    @property
    def word(self) -> str:
        if self.fails:
            return "OUTSIDE"
        return "ok" if self.band else "not judged"


def read(arm: str, directory: Path = HISTORY) -> list[Line]:
    """Returns the recorded runs of an arm, the oldest first."""
    path = directory / f"{arm}.jsonl"
    if not path.exists():
        return []
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()]


def append(arm: str, line: Line, directory: Path = HISTORY) -> None:
    """Records a run of an arm."""
    directory.mkdir(exist_ok=True)
    with (directory / f"{arm}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def band(name: str, lines: Sequence[Line], machine: Machine) -> Band | None:
    """Returns the band of a figure; None if fewer than five lines count."""
    rule = RULES[name]
    values = [
        line.figures[name]
        for line in lines
        if name in line.figures and (not rule.of_machine or line.machine == machine)
    ]
    if len(values) < MIN_LINES:
        return None
    middle = mean(values)
    half = max(DEVIATIONS * stdev(values), rule.floor, rule.relative_floor * abs(middle))
    low = -math.inf if rule.fails == "above" else middle - half
    high = math.inf if rule.fails == "below" else middle + half
    return Band(low, high, len(values))


def judge(arm: str, figures: Figures, machine: Machine, directory: Path = HISTORY) -> list[Verdict]:
    """Compares the figures of a run with the recorded ones."""
    lines = read(arm, directory)
    return [
        Verdict(arm, name, value, band(name, lines, machine)) for name, value in figures.items()
    ]
