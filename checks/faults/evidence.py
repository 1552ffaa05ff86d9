"""What a run left behind: rewards that are not right, prompts that are gone."""

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.faults.fault import Oracle
from common.wire.codec import decode
from common.wire.schemas import Group

_SKIPPED = re.compile(r"prompt \S+ at (\d+) is skipped after")
_REPLACED = "zero_variance"
"""Why dynamic sampling drops a group, whose prompt is then finished."""
_INTEGER = re.compile(r"-?\d+")
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Evidence:
    """Counts of one run."""

    checked: int
    """Rewards that were compared with the right ones."""
    falsified: int
    """Rewards of trained answers that differ from the right ones."""
    lost: int
    """Prompts that are neither trained on, nor named as given up, nor drawn again on resume."""
    given_up: int
    """Prompts that the log names as tried too often."""


def read_evidence(run_dir: Path, output: str, oracle: Oracle | None) -> Evidence:
    """Reads the stores of a run that has ended."""
    groups = _groups(_replay(run_dir))
    if oracle is None and _is_built_in(run_dir):
        oracle = built_in
    checked = 0
    falsified = 0
    for group in groups:
        if oracle is None or not _INTEGER.fullmatch(group.ground_truth):
            continue
        for answer in group.completions:
            checked += 1
            right = oracle(answer.text, group.ground_truth, answer.finish_reason)
            if abs(answer.reward - right) > _TOLERANCE:
                falsified += 1
    skipped = {int(position) for position in _SKIPPED.findall(output)}
    return Evidence(checked, falsified, len(_lost(run_dir, skipped)), len(skipped))


def built_in(text: str, ground_truth: str, finish_reason: str) -> float:
    """Returns the right reward of the built-in task: 1 for an answer that ended by itself with
    `#### N`, where N is the ground truth.
    """
    found = re.search(r"####\s*(-?\d+)\s*$", text)
    if finish_reason != "stop" or found is None:
        return 0.0
    return float(int(found[1]) == int(ground_truth))


def _is_built_in(run_dir: Path) -> bool:
    """Whether the run had single answers, graded by `math` alone."""
    path = run_dir / "config.json"
    if not path.is_file():
        return False
    config: dict[str, Any] = json.loads(path.read_text())
    return bool(config["reward"]["functions"] == ["math"] and not config["environment"]["name"])


def _replay(run_dir: Path) -> Path | None:
    """Returns the replay-buffer's store of a run, whose state may be beside it."""
    places = (run_dir / "state", run_dir.parent / "state")
    found = [place / "replay" / "replay.db" for place in places]
    return next((path for path in found if path.is_file()), None)


def _groups(path: Path | None) -> list[Group]:
    """Returns all stored groups; none of a store that cannot be read."""
    if path is None:
        return []
    try:
        with closing(sqlite3.connect(path)) as db:
            rows = db.execute("SELECT data FROM blobs").fetchall()
    except sqlite3.Error:
        return []
    return [decode(data, Group) for (data,) in rows]


def _lost(run_dir: Path, skipped: set[int]) -> set[int]:
    """Returns the positions that the newest checkpoint calls finished and that were never trained
    on, replaced for equal rewards, or given up. A group that the replay-buffer calls consumed is no
    proof that it was trained on.
    """
    checkpoints = run_dir / "checkpoints"
    found = sorted(checkpoints.glob("step_*/trainer_state.json"))
    state = next(filter(None, (_state(path) for path in reversed(found))), None)
    if state is None:
        return set()
    finished = set(range(state["position"])) | set(state["finished"])
    accounted = set(skipped)
    for line in _lines(run_dir / "groups.jsonl"):
        if line["step"] <= state["step"]:
            accounted |= {group["position"] for group in line["groups"] if not group["reused"]}
            accounted |= {
                group["position"] for group in line["dropped"] if group["reason"] == _REPLACED
            }
    return finished - accounted


def _state(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if {"position", "finished", "step"} <= content.keys() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
