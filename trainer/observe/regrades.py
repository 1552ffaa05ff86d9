"""`regrade.jsonl`: what `rlhf regrade` found last. The dashboard shows it beside the recorded
grades.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from trainer.observe.jsonl import JsonlReader
from trainer.observe.run_dir import storing_run

REGRADES = "regrade.jsonl"


class NewGrade(msgspec.Struct):
    """The grade that an answer gets now."""

    reward: float | None
    correct: bool | None
    """None without a verdict."""
    answer: str | None
    """What was verified."""
    reason: str = ""


class RegradedGroup(msgspec.Struct):
    """A line: a group with an answer whose grade changes."""

    step: int
    id: str
    changed: int
    """How many of its answers get another grade."""
    grades: dict[int, NewGrade]
    """By the index of the completion."""


def write_regrades(run_dir: Path, groups: Iterable[RegradedGroup]) -> Path:
    """Replaces the file. Raises StorageFailed."""
    path = run_dir / REGRADES
    partial = path.with_suffix(".partial")
    with storing_run(path):
        partial.write_bytes(b"".join(msgspec.json.encode(group) + b"\n" for group in groups))
        partial.replace(path)
    return path


def read_regrades(run_dir: Path) -> dict[tuple[int, str], RegradedGroup]:
    """Returns the groups by step and id; none without the file. A damaged line is left out."""
    reader = JsonlReader(run_dir / REGRADES, msgspec.json.Decoder(RegradedGroup).decode)
    return {(group.step, group.id): group for group in reader.read()}
