"""Grades the recorded answers of a run again: with another reward function, other settings, or
corrected answers. Needs no model and no GPU.
"""

import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from common.errors import ConfigError, ServiceError
from common.process.cli import CommandParser, count, run
from common.settings.config import Config, from_mapping
from common.wire.schemas import Prompt, RewardResult
from services.data.files import read_file
from services.data.loaders import load_split
from services.data.rows import Cells, answer_of, refuse, row_at, stop, text_of
from trainer.cli.commands import add_settings, argument_names, run_parser
from trainer.cli.compare import plain_table
from trainer.observe.group_files import CompletionText, recorded_steps
from trainer.observe.problems import kept_problems
from trainer.observe.regrades import NewGrade, RegradedGroup, write_regrades
from trainer.observe.run_dir import (
    ATTEMPTS,
    check_run,
    damaged,
    read_lines,
    read_settings,
    reward_names,
)
from trainer.trackers.base import flatten
from trainer.what_if.grades import AnswerGrade, GroupGrades, Regrading

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
"""Characters that are shown of the beginning of a long text, and of its end."""
_PUBLIC = re.compile(r"^(?:def|class) ([^\W_]\w*)\s*[(:]", re.MULTILINE)
"""The functions and classes of a file whose names do not begin with `_`."""
Counts = NDArray[np.float64]


@dataclass
class Regraded:
    """The result of regrading a run."""

    config: Config
    counts: dict[int, Counts] = field(default_factory=dict)
    """By step, what `_counts` counts."""
    changed: list[GroupGrades] = field(default_factory=list)
    """The groups with an answer that changes."""
    unknown: int = 0
    """Answers that cannot be graded again."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why answers have no reward now."""
    problems: set[str] = field(default_factory=set)
    """Their ids and their texts."""

    def add(self, group: GroupGrades) -> None:
        """Adds a group."""
        self.problems |= {group.group.prompt_id, group.group.prompt}
        self.counts[group.step] = _counts(group) + self.counts.get(group.step, 0.0)
        self.unknown += len(group.group.answers) - len(group.grades)
        for grade in group.grades:
            if grade.now.reward is None:
                self.reasons[grade.now.reason or grade.now.status] += 1
        if group.changed:
            self.changed.append(group)

    def worst(self, count: int) -> list[tuple[GroupGrades, AnswerGrade]]:
        """Returns the largest disagreements, at most one for each problem. A changed verdict counts
        more than a changed reward.
        """
        pairs = [(group, grade) for group in self.changed for grade in group.changed]
        pairs.sort(key=lambda pair: ("→" in pair[1].kind, abs(pair[1].change)), reverse=True)
        found: dict[str, tuple[GroupGrades, AnswerGrade]] = {}
        for group, grade in pairs:
            found.setdefault(group.group.prompt_id, (group, grade))
        return list(found.values())[:count]


def _counts(group: GroupGrades) -> Counts:
    """Counts a group; one that was dropped counts as answers only.

    Returns [2, 9], as recorded and as it is now. Both rows have the answers, those that change, the
    groups whose rewards are all known, and their answers that are pushed in the other direction;
    each has its answers with a reward, with a verdict, right ones, groups that teach, and the mean
    |reward − mean of the group|: the advantage, but for its scale.
    """
    found = np.zeros((2, 9))
    found[:, :2] = len(group.grades), len(group.changed)
    if group.group.reason:
        return found
    for grade in group.grades:
        for row, each in zip(found, grade.sides, strict=True):
            if each.reward is not None:
                row[4:7] += 1, each.verified, each.correct
    if group.rewards is not None:
        # Rounded: the mean of equal rewards may differ from them in its last bit.
        pushes = (group.rewards - group.rewards.mean(axis=1, keepdims=True)).round(12)
        found[:, 2] = 1
        found[:, 3] = (pushes[0] * pushes[1] < 0).sum()
        found[:, 7] = pushes.any(axis=1)
        found[:, 8] = np.abs(pushes).mean(axis=1)
    return found


def _cells(counts: Counts) -> list[str]:
    """Returns the cells of a row of the table of steps."""
    _, changed, groups, turned = counts[0, :4]
    # With an answer that has no verdict, the rewards are no verdicts.
    accuracy = [
        f"{right / graded:.1%}" if 0 < graded == verified else "–"
        for graded, verified, right in counts[:, 4:7]
    ]
    teach = " → ".join(f"{count:.0f}" for count in counts[:, 7])
    return [
        f"{changed:.0f}",
        " → ".join(accuracy),
        f"{teach} of {groups:.0f}",
        " → ".join(f"{total / max(1, groups):.3f}" for total in counts[:, 8]),
        f"{turned:.0f}",
    ]


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR [--reward REWARD …] [--set NAME=VALUE …] [--gold FILE] [--show N]"
    made = run_parser("rlhf regrade", __doc__, usage, _EPILOG)
    made.add_argument(
        "--reward",
        nargs="+",
        metavar="REWARD",
        help="reward functions: names (math), import paths (package.module:Class) or files "
        "(my.py, my.py:name); default: those of the run",
    )
    add_settings(
        made,
        "another setting of the reward, such as reward.require_stop=false",
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
        raise damaged(
            "the run keeps no answers",
            run_dir / "groups",
            "regrade a run with trainer.keep_groups_mb above 0",
        )
    config, own_functions = _settings(run_dir, arguments.reward, dict(arguments.set))
    rows = _rows(run_dir, config)
    golds = {} if arguments.gold is None else read_golds(arguments.gold, config)
    regrading = Regrading(
        run_dir,
        config.reward,
        rows,
        golds,
        functions_of_episodes=own_functions if config.environment.name else None,
    )
    found = Regraded(config)
    began = time.monotonic()
    asyncio.run(regrading.run(found.add))
    used = golds.keys() & found.problems
    if golds and not used:
        raise ConfigError(
            "no row is of a problem that this run asked",
            field="--gold",
            value=next(iter(golds)),
            remedy="give ids as in groups.jsonl (prompt_id), or the texts of the problems",
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _print(console, found, time.monotonic() - began)
    if golds:
        unused = next((f"; not asked: {problem:.80}" for problem in golds.keys() - used), "")
        console.print(
            f"{len(used)} of {len(golds)} corrected answers are of recorded problems{unused}"
        )
    for group, grade in found.worst(arguments.show):
        _print_disagreement(console, group, grade)
    path = write_regrades(run_dir, map(_line, found.changed))
    console.print(f"written: {path}")


def _line(group: GroupGrades) -> RegradedGroup:
    grades = {}
    for grade in group.grades:
        now = grade.now
        correct = now.correct if now.verified else None
        grades[grade.index] = NewGrade(now.reward, correct, now.extracted_answer, now.reason)
    return RegradedGroup(group.step, group.group.id, len(group.changed), grades)


def _settings(
    run_dir: Path, rewards: Sequence[str] | None, changes: Mapping[str, Any]
) -> tuple[Config, list[str]]:
    """Returns the settings to grade with, and the names of the run's own reward functions."""
    content = read_settings(run_dir)
    settings = {
        name: value
        for name, value in flatten(content).items()
        if name.startswith(("reward.", "data.", "environment.name"))
    }
    settings["reward.workers"] = os.cpu_count() or 1
    for name in changes:
        if not name.startswith("reward."):
            raise ConfigError(
                "regrading does not read this setting",
                field="--set",
                value=name,
                remedy="name one of reward, such as reward.require_stop",
            )
    settings |= changes
    if rewards is not None:
        settings["reward.functions"] = [_import_path(reward) for reward in rewards]
    try:
        return from_mapping(settings), reward_names(content)
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
    public = _PUBLIC.findall(path.read_text(encoding="utf-8")) if path.is_file() else []
    names = [each for each in public if name in ("", each)]
    if len(names) != 1:
        known = f"has the functions and classes {', '.join(public) or 'none'}"
        raise ConfigError(
            f"the file {known if path.is_file() else 'does not exist'}",
            field="--reward",
            value=reward,
            remedy=f"name a Python file and one of its functions, as in {file}:reward",
        )
    # Last, so that no file beside it takes the name of a module of the library.
    sys.path.append(str(path.resolve().parent))
    return f"{path.stem}:{names[0]}"


def _rows(run_dir: Path, config: Config) -> dict[str, Prompt]:
    """Returns the rows of the data set by id, for functions that read their further columns; says
    why where they are not known.
    """
    reads_texts = {"math", "format", "length", "repetition"}
    if all(entry.name in reads_texts and entry.tasks == [""] for entry in config.reward.functions):
        return {}
    kept = kept_problems(run_dir)
    if kept is not None:
        return {row.id: row for row in kept.train}
    # A program may have given the prompts; the settings of data are not theirs then.
    given = [line["data"] for line in read_lines(run_dir / ATTEMPTS)][-1:]
    try:
        if given in ([], [config.data.source]):
            return {row.id: row for row in load_split(config.data, "train", config.seed)}
        reason = f"the run had {given[0]}"
    except ServiceError as error:
        reason = f"the data set does not load ({error.message})"
    print(f"graded without further columns of the problems: {reason}")
    return {}


def read_golds(path: Path, config: Config) -> dict[str, str]:
    """Returns the corrected answers of a file by the id or the text of their problems, read as the
    data set is. Raises ConfigError for a row without them, or with another answer than an earlier
    row, and for a file without rows.
    """
    keys = ("id", "prompt_id", config.data.prompt_field)
    answers = (config.data.answer_field, "answer", "ground_truth")
    found: dict[str, str] = {}
    with argument_names({"data.source": "--gold"}):
        for where, row in read_file(path):
            with row_at(where, "--gold"):
                problem = text_of(row, _column(row, keys), f"one of {', '.join(keys)}")
                answer = answer_of(row, _column(row, answers), f"one of {', '.join(answers)}")
                if found.setdefault(problem, answer) != answer:
                    before = f"{problem!r:.80} has the answer {found[problem]!r:.80} before"
                    refuse(f"{before}, and {answer!r:.80} here", "remove one of the two rows")
        if not found:
            stop(f"{path.name} has no rows", path, "give each corrected answer a row")
    return found


def _column(row: Cells, names: Sequence[str]) -> str:
    """Returns the first of the columns that has something in this row, else the first one."""
    return next((name for name in names if row.get(name) not in (None, "")), names[0])


def _print(console: Console, found: Regraded, seconds: float) -> None:
    config = found.config
    steps = sorted(found.counts)
    total = _sum(found, steps)
    answers, changed = total[0, :2]
    console.print(
        f"{answers:,.0f} answers of {len(steps)} steps graded again by "
        f"{', '.join(config.reward.weights)} in {seconds:.1f} s: {changed:,.0f} grades change"
    )
    if config.environment.name:
        console.print(
            "of episodes only the last answer is graded again, where the environment graded it: "
            f"{found.unknown:,} answers cannot be; rlhf audit plays episodes again, with their "
            "tools and the rewards of turns"
        )
    for reason, number in found.reasons.most_common(2):
        console.print(f"{number:,} answers get no reward: {reason.splitlines()[0]}")
    if not found.changed:
        return

    kinds = Counter(grade.kind for group in found.changed for grade in group.changed)
    table = plain_table("what changes", ["change", "answers", "share"])
    for kind, number in kinds.most_common():
        table.add_row(kind, f"{number:,}", f"{number / answers:.2%}")
    console.print(table)

    columns = ["steps", "changed", "accuracy", "groups that teach", "|reward − mean|", "other sign"]
    table = plain_table("recorded → now", columns)
    size = -(-len(steps) // _ROWS)
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        table.add_row(
            str(part[0]) if size == 1 else f"{part[0]}–{part[-1]}", *_cells(_sum(found, part))
        )
    table.add_row("all", *_cells(total))
    console.print(table)


def _sum(found: Regraded, steps: Sequence[int]) -> Counts:
    return sum((found.counts[step] for step in steps), np.zeros((2, 9)))


def _print_disagreement(console: Console, group: GroupGrades, grade: AnswerGrade) -> None:
    """Prints an answer, and its two grades beside each other."""
    of_group = group.group
    table = plain_table(
        f"step {group.step}, group {of_group.id}, answer {grade.index + 1}: {grade.kind}",
        ["", "recorded", "now"],
    )
    recorded = _side(grade.answer, of_group.ground_truth)
    now = _side(grade.now, grade.now.ground_truth)
    for name in recorded | now:
        cells = [side.get(name) for side in (recorded, now)]
        table.add_row(name, *("–" if cell is None else _cut(str(cell)) for cell in cells))
    console.print(table)
    texts = {"problem": of_group.prompt, "answer": grade.answer.text, "reason": grade.now.reason}
    for name, text in texts.items():
        if text:
            console.print(f"{name}: {_cut(text)}")


def _side(grade: CompletionText | RewardResult, gold: str | None) -> dict[str, object]:
    verdict = {True: "right", False: "wrong"}[grade.correct] if grade.verified else None
    return {
        "reward": grade.reward,
        "verdict": verdict,
        "read as": grade.extracted_answer,
        "gold": gold,
        **grade.components,
    }


def _cut(text: str) -> str:
    """Returns a text without its middle if it is long: its end has the final answer."""
    if len(text) <= 2 * _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]} … {text[-_SHOWN_CHARS:]}"


if __name__ == "__main__":
    run(main, "")
