"""The invariants of a run under real faults, checked afterwards in its files.

A killed trainer continues after its newest checkpoint, so later steps are undone: the restart
removes their lines, and their prompts then belong to other steps.
"""

import contextlib
import json
import re
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.wire.codec import decode
from common.wire.schemas import Group
from trainer.observe.run_dir import read_lines

_LEFT_OUT = re.compile(r"prompt (\S+) at (\d+) is skipped after")
_SAME_POLICY = 1e-3
"""|Δ logprob| of trainer and engine with the same weights (docs/explanation/built-in-task.md)."""


@dataclass
class Evidence:
    """The traces that a run left behind."""

    steps: int
    """Steps that the run was configured to make."""
    batch: int
    """Groups per step."""
    metrics: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    """Lines of `groups.jsonl`, one per step."""
    states: dict[str, str]
    """The state of every group in the replay-buffer, by id."""
    evaluations: list[dict[str, Any]]
    left_out: set[int] = field(default_factory=set)
    """Positions that the log reports as tried too often."""


def violations(run: Evidence) -> list[str]:
    """Describes every violated invariant; empty if all hold."""
    checks = (_steps, _exactly_once, _acknowledged, _weights)
    return [f"{check.__name__[1:]}: {problem}" for check in checks for problem in check(run)]


def _steps(run: Evidence) -> list[str]:
    """Every step has exactly one line in both files, in order, and the last one is evaluated."""
    expected = list(range(1, run.steps + 1))
    found = [
        f"{name} has the steps {steps} instead of 1 to {run.steps}"
        for name, lines in (("metrics.jsonl", run.metrics), ("groups.jsonl", run.groups))
        if (steps := [line["step"] for line in lines]) != expected
    ]
    found += [
        f"step {line['step']} has {len(line['groups'])} groups"
        for line in run.groups
        if len(line["groups"]) != run.batch
    ]
    if not run.evaluations or run.evaluations[-1]["step"] != run.steps:
        found.append("there is no evaluation at the end")
    return found


def _exactly_once(run: Evidence) -> list[str]:
    """Every position of the prompt stream was trained on once or is logged as left out."""
    times = Counter(group["position"] for line in run.groups for group in line["groups"])
    found = [
        f"position {at} was trained on {count} times" for at, count in times.items() if count > 1
    ]
    missing = set(range(max(times, default=-1) + 1)) - set(times) - run.left_out
    if missing:
        found.append(f"never trained on, and nobody says why: positions {sorted(missing)}")
    return found


def _acknowledged(run: Evidence) -> list[str]:
    """Every trained group is stored and consumed, and no other group waits."""
    trained = {group["id"] for line in run.groups for group in line["groups"]}
    found = [f"group {name} was trained on and is lost" for name in trained - run.states.keys()]
    return found + [
        f"group {name} is {state}" for name, state in run.states.items() if state != "consumed"
    ]


def _weights(run: Evidence) -> list[str]:
    """The trainer's own log-probabilities confirm the version of weights that an engine reported."""
    return [
        f"step {line['step']}: |Δ logprob| is {delta:.2g}"
        for line in run.metrics
        if (delta := line["update"]["delta_logprob_current"]) > _SAME_POLICY
    ]


def read_groups(path: Path) -> dict[str, Group]:
    """Reads all groups from the file of a replay-buffer that has ended."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        groups = [decode(data, Group) for (data,) in db.execute("SELECT data FROM blobs")]
    return {group.id: group for group in groups}


def read_evidence(run_dir: Path, state_dir: Path) -> Evidence:
    """Reads what a run that has ended left behind."""
    config = json.loads((run_dir / "config.json").read_text())
    with contextlib.closing(sqlite3.connect(state_dir / "replay" / "replay.db")) as db:
        states = dict(db.execute("SELECT id, state FROM groups").fetchall())
    logs = "".join(
        path.read_text(errors="replace")
        for path in sorted((state_dir / "logs").glob("ppo-trainer-rank*.log"))
    )
    return Evidence(
        steps=config["trainer"]["max_steps"],
        batch=config["trainer"]["batch_size"],
        metrics=read_lines(run_dir / "metrics.jsonl"),
        groups=read_lines(run_dir / "groups.jsonl"),
        states=states,
        evaluations=read_lines(run_dir / "evaluations.jsonl"),
        left_out={int(position) for _, position in _LEFT_OUT.findall(logs)},
    )
