"""Grades the recorded answers of a run again: with another reward function, other settings, or
corrected answers. Needs no model and no GPU.
"""

import ast
import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from common import Json
from common.errors import ConfigError, ServiceError
from common.process.cli import CommandParser, count, run
from common.settings.config import Config, from_mapping
from common.wire.schemas import Prompt
from services.data.files import read_file
from services.data.loaders import load_split
from trainer.cli.commands import argument_names, setting
from trainer.cli.compare import plain_table
from trainer.observe.group_files import recorded_steps
from trainer.observe.regrades import NewGrade, RegradedGroup, write_regrades
from trainer.observe.run_dir import check_run, damaged, read_settings
from trainer.what_if.grades import GroupGrades, Regrading, advantages

_EPILOG = """\
examples:
  rlhf regrade runs/demo-seed0                                # the run's own reward, again
  rlhf regrade runs/demo-seed0 --reward my.py                 # a function of completions in a file
  rlhf regrade runs/demo-seed0 --set reward.require_stop=false
  rlhf regrade runs/demo-seed0 --gold corrected.jsonl         # columns id or question, and answer

Prints which grades change, by kind and by steps, what that would have done to accuracy, advantages
and the groups that teach, and the worst disagreements. Each group with a changed grade is a line of
RUN_DIR/regrade.jsonl, which the dashboard shows.
"""
_ROWS = 12
"""Most rows of the table of steps; neighbours are merged into as many."""
_SHOWN_CHARS = 400
"""Of the beginning of a long text, and of its end."""
_VERDICTS = {True: "right", False: "wrong", None: "–"}
_COLUMNS_OF_KEY = ("id", "prompt_id")
_SIDES = ("was", "now")


@dataclass
class Regraded:
    """The result of regrading a run."""

    config: Config
    sums: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step, what `_count` counts."""
    kinds: dict[str, list[int]] = field(default_factory=dict)
    """The steps of the answers that change, by the kind of their change."""
    changed: list[GroupGrades] = field(default_factory=list)
    """The groups with an answer that changes."""
    unknown: int = 0
    """Answers that cannot be graded again."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why answers have no reward now."""

    def add(self, group: GroupGrades) -> None:
        """Adds a group."""
        _count(self.sums.setdefault(group.step, defaultdict(float)), group, self.config)
        self.unknown += len(group.grades) - len(group.known)
        lost = [grade.now for grade in group.known if grade.now.reward is None]
        self.reasons.update(grade.reason or grade.status for grade in lost)
        for grade in group.changed:
            self.kinds.setdefault(grade.kind, []).append(group.step)
        if group.changed:
            self.changed.append(group)

    def worst(self, count: int) -> list[tuple[GroupGrades, int]]:
        """Returns the largest disagreements, another verdict before another reward, at most one for
        each problem: the group, and the index of the answer.
        """
        found: dict[str, tuple[tuple[bool, float], GroupGrades, int]] = {}
        for group in self.changed:
            for index, grade in group.grades.items():
                known = found.get(group.group.prompt_id)
                if grade and grade.kind and (known is None or grade.distance > known[0]):
                    found[group.group.prompt_id] = (grade.distance, group, index)
        ordered = sorted(found.values(), key=lambda each: each[0], reverse=True)
        return [(group, index) for _, group, index in ordered[:count]]


def _count(sums: dict[str, float], group: GroupGrades, config: Config) -> None:
    """Adds a group to sums; one that was dropped counts as answers only."""
    sums["answers"] += len(group.known)
    sums["changed"] += len(group.changed)
    if group.group.reason:
        return
    sides = zip(*((grade.answer, grade.now) for grade in group.known), strict=True)
    for side, grades in zip(_SIDES, sides, strict=False):
        graded = [grade for grade in grades if grade.reward is not None]
        sums[f"graded {side}"] += len(graded)
        sums[f"verified {side}"] += sum(grade.verified for grade in graded)
        sums[f"right {side}"] += sum(grade.correct for grade in graded)
    if group.rewards is None:
        return
    pushes = [advantages(rewards, config.algorithm) for rewards in group.rewards]
    sums["groups"] += 1
    sums["turned"] += int((pushes[0] * pushes[1] < 0).sum())
    for side, each in zip(_SIDES, pushes, strict=True):
        sums[f"teach {side}"] += bool(each.any())
        sums[f"push {side}"] += float(np.abs(each).mean())


def _cells(sums: dict[str, float]) -> list[str]:
    """Returns the cells of a row of the table of steps."""
    accuracy = []
    for side in _SIDES:
        # With an answer that has no verdict, the rewards are no verdicts.
        has_one = 0 < sums[f"graded {side}"] == sums[f"verified {side}"]
        accuracy.append(f"{sums[f'right {side}'] / sums[f'graded {side}']:.1%}" if has_one else "–")
    teach = [f"{sums[f'teach {side}']:.0f}" for side in _SIDES]
    push = [f"{sums[f'push {side}'] / max(1, sums['groups']):.3f}" for side in _SIDES]
    return [
        f"{sums['changed']:.0f}",
        " → ".join(accuracy),
        f"{' → '.join(teach)} of {sums['groups']:.0f}",
        " → ".join(push),
        f"{sums['turned']:.0f}",
    ]


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR [--reward REWARD …] [--set NAME=VALUE …] [--gold FILE] [--show N]"
    made = CommandParser("rlhf regrade", __doc__ or "", usage, _EPILOG)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    made.add_argument(
        "--reward",
        nargs="+",
        metavar="REWARD",
        help="reward functions: names (math), import paths (package.module:Class) or files "
        "(my.py, my.py:name); default: those of the run",
    )
    made.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another setting of the reward, such as reward.require_stop=false",
    )
    made.add_argument(
        "--gold", type=Path, metavar="FILE", help="corrected answers, by id or text of the problem"
    )
    made.add_argument(
        "--show", type=count, default=3, metavar="N", help="disagreements to show (default 3)"
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Grades and prints. Raises ConfigError for arguments or a record that cannot be used."""
    arguments = parser().parse_args(argv)
    run_dir: Path = arguments.run_dir
    check_run(run_dir)
    if not recorded_steps(run_dir):
        remedy = "regrade a run with trainer.keep_groups_mb above 0"
        raise damaged("the run keeps no answers", run_dir / "groups", remedy)
    config, own_functions = _settings(run_dir, arguments.reward, dict(arguments.set))
    rows, why_no_rows = _rows(config)
    golds: dict[str, str] = {}
    if arguments.gold is not None:
        with argument_names({"data.source": "--gold"}):
            golds = read_golds(arguments.gold, config)
    regrading = Regrading(
        run_dir,
        config.reward,
        rows,
        golds,
        functions_of_episodes=own_functions if config.environment.name else None,
    )
    found = Regraded(config)
    began = time.monotonic()
    used = asyncio.run(_grade(regrading, found))
    console = Console(highlight=False, soft_wrap=True)
    _print(console, found, time.monotonic() - began)
    if why_no_rows:
        console.print(f"graded without further columns of the problems: {why_no_rows}")
    if golds:
        console.print(f"{len(used)} of {len(golds)} corrected answers are of recorded problems")
    for group, index in found.worst(arguments.show):
        _print_disagreement(console, group, index)
    path = write_regrades(run_dir, map(_line, found.changed))
    console.print(f"written: {path}")


def _line(group: GroupGrades) -> RegradedGroup:
    grades = {
        index: NewGrade(
            reward=grade.now.reward,
            correct=grade.now.correct if grade.now.verified else None,
            answer=grade.now.extracted_answer,
            reason=grade.now.reason,
        )
        for index, grade in group.grades.items()
        if grade is not None
    }
    return RegradedGroup(group.step, group.group.id, len(group.changed), grades)


async def _grade(regrading: Regrading, found: Regraded) -> set[str]:
    """Adds all groups to `found`; returns the keys of the corrected answers that were used."""
    used: set[str] = set()
    async for groups in regrading.steps():
        for group in groups:
            used |= {group.group.prompt_id, group.group.prompt} & regrading.golds.keys()
            found.add(group)
    if regrading.golds and not used:
        raise ConfigError(
            "no row is of a prompt of this run",
            field="--gold",
            value=next(iter(regrading.golds)),
            remedy="give ids as in groups.jsonl (prompt_id), or the texts of the problems",
        )
    return used


def _settings(
    run_dir: Path, rewards: Sequence[str] | None, changes: Mapping[str, Any]
) -> tuple[Config, set[str]]:
    """Returns the settings to grade with, and the names of the run's own reward functions."""
    content = read_settings(run_dir)
    recorded = content.get("reward", {})
    entries = recorded.get("functions", ["math"])
    own = {entry if isinstance(entry, str) else entry["name"] for entry in entries}
    settings: Json = {
        f"{section}.{name}": value
        for section in ("reward", "data", "algorithm")
        for name, value in content.get(section, {}).items()
    }
    settings["environment.name"] = content.get("environment", {}).get("name", "")
    settings["reward.workers"] = os.cpu_count() or 1
    for name in changes:
        if name.partition(".")[0] not in ("reward", "algorithm"):
            raise ConfigError(
                "regrading does not read this setting",
                field="--set",
                value=name,
                remedy="name one of reward, or of algorithm (how advantages are computed)",
            )
    settings |= changes
    if rewards is not None:
        settings["reward.functions"] = [_import_path(reward) for reward in rewards]
    try:
        return from_mapping(settings), own
    except ConfigError as error:
        if (error.field or "").startswith("reward.functions") and rewards is None:
            error.remedy = "name the reward functions with --reward: those of the run were objects"
        raise


def _import_path(reward: str) -> str:
    """Returns the import path of a function in a file, whose folder becomes importable; any other
    name as it is.
    """
    file, _, name = reward.partition(":")
    path = Path(file)
    if path.suffix != ".py":
        return reward
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"the file of the reward function cannot be read: {error}",
            field="--reward",
            value=reward,
            remedy="name a Python file with a function of completions",
        ) from None
    public = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    if not name and len(public) != 1:
        raise ConfigError(
            f"the file has {len(public)} functions and classes",
            field="--reward",
            value=reward,
            remedy=f"name one of them, as in {file}:{(public or ['reward'])[0]}",
        )
    sys.path.insert(0, str(path.resolve().parent))
    return f"{path.stem}:{name or public[0]}"


def _rows(config: Config) -> tuple[dict[str, Prompt], str]:
    """Returns the rows of the data set by id, for functions that read their further columns, and
    why they are not known.
    """
    reads_texts = {"math", "format", "length", "repetition"}
    entries = config.reward.functions
    if all(entry.name in reads_texts and entry.tasks == [""] for entry in entries):
        return {}, ""
    try:
        return {row.id: row for row in load_split(config.data, "train", config.seed)}, ""
    except ServiceError as error:
        return {}, f"the data set does not load ({error.message})"


def read_golds(path: Path, config: Config) -> dict[str, str]:
    """Returns the corrected answers of a file by the id or the text of their problems. Raises
    ConfigError for a row without them.
    """
    found: dict[str, str] = {}
    keys = [*_COLUMNS_OF_KEY, config.data.prompt_field]
    answers = [config.data.answer_field, "answer", "ground_truth"]
    for where, row in read_file(path):
        key = next((name for name in keys if name in row), None)
        answer = next((name for name in answers if name in row), None)
        if key is None or answer is None:
            wanted = f"one of {', '.join(keys)}" if key is None else f"one of {', '.join(answers)}"
            raise ConfigError(
                f"{where}: a column is missing",
                field="--gold",
                value=", ".join(map(str, row)),
                remedy=f"give the row {wanted}",
            )
        found[str(row[key])] = str(row[answer])
    return found


def _print(console: Console, found: Regraded, seconds: float) -> None:
    config = found.config
    total: dict[str, float] = defaultdict(float)
    for sums in found.sums.values():
        _merge(total, sums)
    console.print(
        f"{total['answers']:,.0f} answers of {len(found.sums)} steps graded again by "
        f"{', '.join(config.reward.weights)} in {seconds:.1f} s: "
        f"{total['changed']:,.0f} grades change"
    )
    if config.environment.name:
        console.print(
            "of episodes only the last answer is graded again; rewards of turns, and what an "
            "environment sees of its tools, need the episode (rlhf audit plays it again)"
        )
    if found.unknown:
        console.print(
            f"{found.unknown:,} answers of episodes cannot be graded again: the run does not "
            "record the last answer of an episode that reward functions graded"
        )
    for reason, number in found.reasons.most_common(2):
        console.print(f"{number:,} answers get no reward: {reason.splitlines()[0]}", markup=False)
    if not found.changed:
        return

    table = plain_table("what changes", ["change", "answers", "share", "steps"])
    for kind, steps in sorted(found.kinds.items(), key=lambda pair: -len(pair[1])):
        share = f"{len(steps) / total['answers']:.2%}"
        table.add_row(kind, f"{len(steps):,}", share, _span(steps))
    console.print(table)

    has_other = config.algorithm.advantage in ("gae", "reward_normalised", "length_weighted")
    advantage = "|reward − mean|" if has_other else "|advantage|"
    columns = ["steps", "changed", "accuracy", "groups that teach", advantage, "other sign"]
    table = plain_table("recorded → now", columns)
    numbers = sorted(found.sums)
    size = -(-len(numbers) // _ROWS)
    for start in range(0, len(numbers), size):
        merged: dict[str, float] = defaultdict(float)
        for step in numbers[start : start + size]:
            _merge(merged, found.sums[step])
        table.add_row(_span(numbers[start : start + size]), *_cells(merged))
    table.add_row("all", *_cells(total))
    console.print(table)


def _merge(sums: dict[str, float], other: Mapping[str, float]) -> None:
    for name, value in other.items():
        sums[name] += value


def _span(steps: Sequence[int]) -> str:
    first = min(steps)
    last = max(steps)
    return str(first) if first == last else f"{first}–{last}"


def _print_disagreement(console: Console, group: GroupGrades, index: int) -> None:
    """Prints an answer, and its two grades beside each other."""
    grade = group.grades[index]
    assert grade is not None, "it was graded"
    of_group = group.group
    said = f"step {group.step}, group {of_group.id}, answer {index + 1}: {grade.kind}"
    table = plain_table(said, ["", "recorded", "now"])
    sides = [
        {
            "reward": str(each.reward),
            "verdict": _VERDICTS[each.correct if each.verified else None],
            "read as": each.extracted_answer or "–",
            "gold": gold,
            **{name: str(score) for name, score in each.components.items()},
        }
        for each, gold in (
            (grade.answer, of_group.ground_truth),
            (grade.now, grade.now.ground_truth),
        )
    ]
    for name in sides[0] | sides[1]:
        table.add_row(name, *(escape(_cut(side.get(name, "–"))) for side in sides))
    console.print(table)
    for name, text in (("problem", of_group.prompt), ("answer", grade.answer.text)):
        console.print(f"{name}: {_cut(text)}", markup=False)
    if grade.now.reason:
        console.print(f"reason: {_cut(grade.now.reason)}", markup=False)


def _cut(text: str) -> str:
    """Returns a text without its middle if it is long: its end has the final answer."""
    if len(text) <= 2 * _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]} … {text[-_SHOWN_CHARS:]}"


if __name__ == "__main__":
    run(main, "")
