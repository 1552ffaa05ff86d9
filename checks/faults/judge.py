"""Judges what a run said about its fault. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from checks.faults.fault import Fault

LIMIT_S = 60.0
"""A cause that is named later counts as not named, unless a configured timeout is longer."""
_NODE = re.compile(r"^[\w-]+ +\| ")
"""What the local runner writes before the lines of a node."""
_STEP = re.compile(r"^step +\d+/\d+ |^\{'loss': ")
"""The numbers of a step, here and in TRL."""
_TRACEBACK = "Traceback (most recent call last):"
_FILE = re.compile(r'File "[^"]*", line \d+, ')
_COMPLAINT = re.compile(
    r"^(alarm|hint|warning|error|diagnosis)\b|\b(WARNING|ERROR|CRITICAL)\b"
    r"|^[\w.]*(Error|Failed|Exception|Lost|Unreachable)\b|^\[RANK \d+\] "
)


@dataclass(frozen=True)
class Line:
    """A line of the run's output."""

    at: float
    """Seconds of the monotonic clock."""
    text: str
    """Without colours."""


@dataclass(frozen=True)
class Judgement:
    """What the lines of a run say about its fault."""

    verdict: str
    """`named`, `late`, `misnamed` (it complained of something else), `silent`, or for a harmless
    fault `untouched` or `disturbed`; `not injected` if the run ended before the fault."""
    detected_s: float | None
    """Seconds from the fault to the first line that complains of anything."""
    named_s: float | None
    """Seconds from the fault to the first line that names its cause."""
    steps: int | None
    """Steps between the fault and that line."""
    line: str
    """That line; without one, the first that complains."""
    before: tuple[str, ...]
    """Lines that complained earlier, of something else."""

    @property
    def is_right(self) -> bool:
        return self.verdict in ("named", "untouched")


def complains(text: str) -> bool:
    """Whether a line is a complaint: an alarm, a hint, a warning, an error or a traceback."""
    return _COMPLAINT.search(_NODE.sub("", text)) is not None or text.startswith(_TRACEBACK)


def _is_step(line: Line) -> bool:
    return _STEP.match(_NODE.sub("", line.text)) is not None


def judge(fault: Fault, lines: Sequence[Line], struck: float, ended_well: bool) -> Judgement:
    """Judges the lines that came after the fault struck."""
    after = _with_tracebacks([line for line in lines if line.at >= struck])
    complaints = [line for line in after if complains(line.text)]
    said = [line for line in after if not _is_step(line)]  # its numbers explain nothing
    naming = next((line for line in said if fault.is_named_by(line.text)), None)
    first = complaints[0] if complaints else None
    shown = naming or first
    earlier = [line.text for line in complaints if naming is None or line.at < naming.at]

    steps = None
    if naming is not None:
        steps = sum(line.at <= naming.at and _is_step(line) for line in after)

    detected = [line.at - struck for line in (first, naming) if line is not None]
    return Judgement(
        verdict=_verdict(fault, naming, first, struck=struck, ended_well=ended_well),
        detected_s=min(detected, default=None),
        named_s=None if naming is None else naming.at - struck,
        steps=steps,
        line="" if shown is None else shown.text.rpartition("\n")[2],
        before=tuple(earlier),
    )


def _with_tracebacks(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines; those of a traceback, which say one thing together, as one without the
    paths of its files.
    """
    found: list[Line] = []
    inside: list[str] = []
    for line in lines:
        text = _NODE.sub("", line.text)
        if text.startswith(_TRACEBACK):
            inside = [text]
        elif inside and text.startswith(" "):
            inside.append(_FILE.sub("", text))
        elif inside:
            found.append(Line(line.at, "\n".join([*inside, line.text])))
            inside = []
        else:
            found.append(line)
    if inside:
        found.append(Line(lines[-1].at, "\n".join(inside)))
    return found


def _verdict(
    fault: Fault, naming: Line | None, first: Line | None, *, struck: float, ended_well: bool
) -> str:
    if fault.harmless:
        return "untouched" if ended_well and first is None else "disturbed"
    if naming is not None and fault.in_steps:
        return "named"  # how many steps it takes is for the table
    if naming is not None:
        limit = max(LIMIT_S, 2 * fault.timeout_s)
        return "named" if naming.at - struck <= limit else "late"
    return "silent" if first is None else "misnamed"
