"""Grades the recorded answers of a run again. Needs their texts only: no model, no torch."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.settings.sections import RewardSection
from common.wire.schemas import Prompt, RewardItem, RewardResult
from services.reward.service import RewardService
from trainer.observe.group_files import CompletionText, GroupTexts, read_texts, recorded_steps
from trainer.observe.run_dir import damaged
from trainer.rollouts.requests import GeneratedAnswer, reward_items, row_of

_STEPS_AT_ONCE = 4
"""Steps whose answers are in the graders together: while workers compare, others are read."""
_ITEMS_AT_ONCE = 1024
"""Answers in one call of the service."""


@dataclass(frozen=True)
class AnswerGrade:
    """A recorded answer, with the grade that it gets now."""

    index: int
    """Where the answer's completion stands in its group."""
    answer: CompletionText
    now: RewardResult

    @property
    def sides(self) -> tuple[CompletionText | RewardResult, CompletionText | RewardResult]:
        """The grade as recorded, and as it is now."""
        return self.answer, self.now

    @property
    def change(self) -> float:
        """The reward that it gets now minus the recorded one; a missing reward counts as 0."""
        return (self.now.reward or 0.0) - (self.answer.reward or 0.0)

    @property
    def kind(self) -> str:
        """How the grade changes, such as `right → wrong`; empty if it is the same."""
        are_verdicts = self.answer.verified and self.now.verified
        labels = [_label(each, are_verdicts) for each in self.sides]
        if labels[0] != labels[1]:
            return " → ".join(labels)
        if self.change == 0.0:
            return ""
        return "reward higher" if self.change > 0.0 else "reward lower"


def _label(grade: CompletionText | RewardResult, are_verdicts: bool) -> str:
    if grade.reward is None:
        return "not graded"
    if not are_verdicts:
        return "graded"
    return "right" if grade.correct else "wrong"


@dataclass(frozen=True)
class GroupGrades:
    """A recorded group, with the grades that its answers get now."""

    step: int
    group: GroupTexts
    grades: list[AnswerGrade] = field(default_factory=list)
    """The grades of those answers that can be graded again."""

    @property
    def changed(self) -> list[AnswerGrade]:
        """The answers whose grade changes."""
        return [grade for grade in self.grades if grade.kind]

    @property
    def rewards(self) -> NDArray[np.float64] | None:
        """The rewards as recorded and as they are now, [2, n]; None unless all are known."""
        pairs = [(grade.answer.reward, grade.now.reward) for grade in self.grades]
        rewards = np.array(pairs, np.float64).T  # NaN for a missing one
        is_whole = 0 < len(pairs) == len(self.group.answers)
        return rewards if is_whole and np.isfinite(rewards).all() else None


@dataclass(frozen=True)
class Regrading:
    """Grades the recorded answers of a run again.

    Args:
        run_dir: directory of the run.
        reward: the functions that grade now.
        rows: rows of the data set by id, for functions that read further columns.
        golds: corrected answers, by the id or the text of the prompt.
        functions_of_episodes: the names of the run's own functions, if it played episodes.
    """

    run_dir: Path
    reward: RewardSection
    rows: Mapping[str, Prompt]
    golds: Mapping[str, str]
    functions_of_episodes: Collection[str] | None = None

    async def run(self, add: Callable[[GroupGrades], None]) -> None:
        """Gives each group with its new grades to `add`, in the order of steps; a group that was
        reused comes once, with its first step.

        Raises ConfigError for a file that cannot be read, InvalidInput for an answer that the
        reward functions cannot grade.
        """
        steps = sorted(recorded_steps(self.run_dir).items())
        async with RewardService(self.reward) as service:
            for first in range(0, len(steps), _STEPS_AT_ONCE):
                calls = [
                    self._step(service, step, path)
                    for step, path in steps[first : first + _STEPS_AT_ONCE]
                ]
                for group in chain.from_iterable(await asyncio.gather(*calls)):
                    add(group)

    async def _step(self, service: RewardService, step: int, path: Path) -> list[GroupGrades]:
        groups = read_texts(self.run_dir, step)
        if not groups or not all(group.id for group in groups):
            raise damaged(f"the groups of step {step} cannot be read", path)

        found = [GroupGrades(step, group) for group in groups if not group.reused]
        asked = [(graded, *pair) for graded in found for pair in self._items(graded.group)]
        for start in range(0, len(asked), _ITEMS_AT_ONCE):
            part = asked[start : start + _ITEMS_AT_ONCE]
            results = await service.score([item for *_, item in part])
            for (graded, index, _), result in zip(part, results, strict=True):
                answer = graded.group.completions[index]
                graded.grades.append(AnswerGrade(index, answer, result))
        return found

    def _items(self, group: GroupTexts) -> Iterator[tuple[int, RewardItem]]:
        """Yields the index of each answer, and the input of the reward functions for it.

        An episode's input is its last answer, which the run recorded if the environment gave the
        reward; other episodes are left out.
        """
        row = row_of(group, self.rows)
        row.ground_truth = self.golds.get(
            group.prompt_id, self.golds.get(group.prompt, group.ground_truth)
        )
        for index in group.answers:
            completion = group.completions[index]
            text: str | None = completion.text
            functions = self.functions_of_episodes
            if functions is not None:
                by_environment = completion.components.keys().isdisjoint(functions)
                text = completion.extracted_answer if by_environment else None
            if text is not None:
                answer = GeneratedAnswer(text, completion.finish_reason, tokens=None)
                yield index, reward_items(row, [answer])[0]
