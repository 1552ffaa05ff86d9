"""The invariants of a run under any faults, checked afterwards in its stores and logs.

The *lineage* of a run is the steps that produced its final weights: those in the run directory at
the end. A killed
trainer continues after its newest checkpoint, so later steps are undone: the restart removes their
lines, and their prompts then belong to other steps. "Exactly once" is a property of the lineage;
"no group is handed out twice" is a property of the whole history (`seen`).
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
    """The traces a run left behind. Groups have the form of `groups.jsonl`."""

    steps: int
    """Steps that the run was configured to make."""
    batch: int
    """Groups per step."""
    max_staleness: int
    prompts: int
    """Prompts in an epoch."""
    target_accuracy: float
    metrics: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    """Lines of the lineage, one per step."""
    seen: list[list[dict[str, Any]]]
    """The groups of every step ever recorded, undone steps included, in order of arrival."""
    stored: dict[str, tuple[str, int, str]]
    """(state, position, prompt id) of every group in the replay-buffer, by group id."""
    counters: dict[str, int]
    """Counters of the replay-buffer."""
    cursor: int
    """Position of the data-server in the prompt stream."""
    evaluations: list[dict[str, Any]]
    left_out: set[int] = field(default_factory=set)
    """Positions that the log reports as tried too often."""
    group_size: int = 0
    episodes: dict[str, Group] = field(default_factory=dict)
    """The stored groups by id, if the run trained on episodes of
    `tests.support.environments.own_environments:Ponders`."""
    status: int = 0
    processes: list[str] = field(default_factory=list)
    """Processes that are still alive."""

    def trained(self) -> list[dict[str, Any]]:
        """Returns the fresh groups of the lineage."""
        return [group for line in self.groups for group in line["groups"] if not group["reused"]]


def violations(run: Evidence) -> list[str]:
    """Describes every violated invariant; empty if all hold."""
    checks = (
        _ended,
        _steps,
        _exactly_once,
        _acknowledged,
        _handed_out_once,
        _weight_versions,
        _episodes,
        _accuracy,
    )
    return [f"{check.__name__[1:]}: {problem}" for check in checks for problem in check(run)]


def _ended(run: Evidence) -> list[str]:
    """The run ends successfully and leaves no process behind."""
    found = [f"exit status {run.status}"] if run.status else []
    return found + [f"still there: {text}" for text in run.processes]


def _steps(run: Evidence) -> list[str]:
    """Every step has exactly one line in both files, in order."""
    expected = list(range(1, run.steps + 1))
    found = []
    for name, lines in (("metrics.jsonl", run.metrics), ("groups.jsonl", run.groups)):
        if (steps := [line["step"] for line in lines]) != expected:
            found.append(f"{name} has the steps {steps} instead of 1 to {run.steps}")
    found += [
        f"step {line['step']} has {len(line['groups'])} groups"
        for line in run.groups
        if len(line["groups"]) != run.batch
    ]
    return found


def _exactly_once(run: Evidence) -> list[str]:
    """Every position of the prompt stream, and every prompt, was trained on once or is logged as
    left out."""
    positions = Counter(group["position"] for group in run.trained())
    found = [
        f"position {position} was trained on {times} times"
        for position, times in positions.items()
        if times > 1
    ]
    done = set(positions) | run.left_out
    end = max(positions, default=-1) + 1
    if missing := sorted(set(range(end)) - done):
        found.append(f"never trained on, and nobody says why: positions {missing}")
    if end > run.cursor:
        found.append(
            f"the data-server handed out {run.cursor} prompts, position {end - 1} was trained on"
        )
    by_epoch = Counter(
        (group["position"] // run.prompts, group["prompt_id"]) for group in run.trained()
    )
    found += [
        f"prompt {prompt} {times} times in epoch {epoch}"
        for (epoch, prompt), times in by_epoch.items()
        if times > 1
    ]
    names: dict[int, set[str]] = {}
    for _, position, prompt in run.stored.values():
        names.setdefault(position, set()).add(prompt)
    return found + [
        f"position {at} was that of {sorted(several)}"
        for at, several in names.items()
        if len(several) > 1
    ]


def _acknowledged(run: Evidence) -> list[str]:
    """No stored group is lost: the trained ones are present and consumed, none waits, and the
    counters add up."""
    found = []
    for group in run.trained():
        state = run.stored[group["id"]][0] if group["id"] in run.stored else "lost"
        if state != "consumed":
            found.append(
                f"group {group['id']} (position {group['position']}) was trained on and is {state}"
            )
    if waiting := [name for name, (state, _, _) in run.stored.items() if state != "consumed"]:
        found.append(
            f"{len(waiting)} groups were never handed out or never acknowledged: {waiting[:3]}"
        )
    left = run.counters["added"] - sum(
        run.counters[name] for name in ("evicted", "removed", "dropped")
    )
    if left != len(run.stored):
        found.append(
            f"{left} groups should be stored by {run.counters}, there are {len(run.stored)}"
        )
    return found


def _handed_out_once(run: Evidence) -> list[str]:
    """No group was handed out as fresh for two steps, undone steps included."""
    times = Counter(group["id"] for groups in run.seen for group in groups if not group["reused"])
    return [
        f"group {name} was handed out {count} times" for name, count in times.items() if count > 1
    ]


def _weight_versions(run: Evidence) -> list[str]:
    """The groups and their weights are at most `max_staleness` versions older than the policy they
    updated."""
    found = []
    for line in run.groups:
        newest, oldest = line["step"] - 1, line["step"] - 1 - run.max_staleness
        for group in line["groups"]:
            first, last = group["versions"]
            if not group["reused"] and not oldest <= first <= last <= newest:
                found.append(
                    f"step {line['step']} trained on weights {first} to {last}: {group['id']}"
                )
    # The trainer's own log-probabilities tell whether the version an engine reported was true.
    for line in run.metrics:
        if (delta := line["update"]["delta_logprob_current"]) > _SAME_POLICY:
            found.append(
                f"step {line['step']}: |Δ logprob| is {delta:.2g} where engine and trainer have the same version"
            )
    return found


def _episodes(run: Evidence) -> list[str]:
    """A trained group has all its episodes, complete: exactly the turns that the environment
    saw."""
    found = []
    for group in run.trained() if run.episodes else ():
        stored = run.episodes[group["id"]]
        if (numbers := [each.episode for each in stored.completions]) != list(
            range(run.group_size)
        ):
            found.append(
                f"group {stored.id} has the episodes {numbers} instead of {run.group_size} of one sequence each"
            )
        for each in stored.completions:
            where = f"episode {each.episode} of group {stored.id}"
            sampled = sum(turn.end - turn.start for turn in each.turns)
            if (
                each.mask is None
                or int(each.mask.sum()) != sampled
                or any(each.logprobs[each.mask == 0])
            ):
                found.append(f"{where}: its mask is not its turns")
            steps = round(1000 * (each.components.get("steps") or 0.0))
            cut = each.finish_reason == "length"  # the environment does not see a truncated answer
            if not steps <= len(each.turns) <= steps + cut:
                found.append(
                    f"{where} has {len(each.turns)} turns, and its environment has seen {steps}"
                )
    return found


def _accuracy(run: Evidence) -> list[str]:
    """The run learned as much as an undisturbed run. Episodes are exempt: they teach nothing."""
    if not run.evaluations or run.evaluations[-1]["step"] != run.steps:
        return ["there is no evaluation at the end"]
    if run.episodes:
        return []
    reached = run.evaluations[-1]["accuracy"]
    return [f"{reached:.3f}, below {run.target_accuracy}"] if reached < run.target_accuracy else []


def read_replay(path: Path) -> tuple[dict[str, tuple[str, int, str]], dict[str, int]]:
    """Reads (stored, counters) of `Evidence` from the file of a replay-buffer that has ended."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT id, state, position, prompt_id FROM groups").fetchall()
        counters = {
            name: int(value) for name, value in db.execute("SELECT name, value FROM counters")
        }
    return {name: (state, position, prompt) for name, state, position, prompt in rows}, counters


def read_groups(path: Path) -> dict[str, Group]:
    """Reads all groups from the file of a replay-buffer that has ended."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        groups = [decode(data, Group) for (data,) in db.execute("SELECT data FROM blobs")]
    return {group.id: group for group in groups}


def read_cursor(path: Path) -> int:
    """Reads the position of the data-server's shuffled stream."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(
            db.execute("SELECT position FROM cursors WHERE stream = 'shuffled'").fetchone()[0]
        )


def read_evidence(
    run_dir: Path, state_dir: Path, seen: list[list[dict[str, Any]]], target_accuracy: float
) -> Evidence:
    """Reads everything except `status` and `processes`."""
    config = json.loads((run_dir / "config.json").read_text())
    batch, prompts = config["trainer"]["batch_size"], config["data"]["num_samples"]
    stored, counters = read_replay(state_dir / "replay" / "replay.db")
    logs = "".join(
        path.read_text(errors="replace")
        for path in sorted((state_dir / "logs").glob("ppo-trainer-rank*.log"))
    )
    return Evidence(
        steps=config["trainer"]["max_steps"] or prompts * config["trainer"]["num_epochs"] // batch,
        batch=batch,
        max_staleness=config["trainer"]["max_staleness"],
        prompts=prompts,
        target_accuracy=target_accuracy,
        metrics=read_lines(run_dir / "metrics.jsonl"),
        groups=read_lines(run_dir / "groups.jsonl"),
        seen=seen,
        stored=stored,
        counters=counters,
        cursor=read_cursor(state_dir / "data" / "stream.db"),
        evaluations=read_lines(run_dir / "evaluations.jsonl"),
        group_size=config["sampling"]["group_size"],
        episodes=read_groups(state_dir / "replay" / "replay.db")
        if config["environment"]["name"]
        else {},
        left_out={int(position) for _, position in _LEFT_OUT.findall(logs)},
    )
