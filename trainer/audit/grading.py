"""Grades the answers of a step again, with the reward functions of the run."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import ServiceError
from common.settings.config import Config
from common.wire.schemas import Completion, Prompt, RewardItem, RewardResult
from services.reward.service import RewardService
from trainer.audit.comparison import StageOutcome
from trainer.audit.recorded import RecordedStep
from trainer.rollouts.requests import GeneratedAnswer, reward_items, row_of

_MAX_GRADE = 1024
"""Maximum number of answers in one call."""


@dataclass(frozen=True)
class GradedAnswer:
    """An answer that reward functions graded."""

    name: str
    """Its name in messages."""
    item: RewardItem
    completion: Completion
    """With its recorded grade."""
    of_turns: float = 0.0
    """The part of the recorded reward that the environment gave for single turns."""


def answers_of_groups(recorded: RecordedStep, rows: Mapping[str, Prompt]) -> list[GradedAnswer]:
    """Returns the answers of groups of single completions, whose text was graded."""
    found = []
    names = iter(recorded.names)
    for item in recorded.groups:
        group = item.group
        graded = reward_items(row_of(group, rows), group.completions)
        for completion, reward_item in zip(group.completions, graded, strict=True):
            name = next(names)
            if not item.reused:
                found.append(GradedAnswer(name, reward_item, completion))
    return found


def answer_of_episode(
    name: str, row: Prompt, text: str, completion: Completion, of_turns: float
) -> GradedAnswer:
    """Returns the last answer of an episode, which reward functions graded."""
    answer = GeneratedAnswer(text, finish_reason=completion.finish_reason, tokens=None)
    (item,) = reward_items(row, [answer])
    return GradedAnswer(name, item, completion, of_turns)


def graded_again(config: Config, answers: Sequence[GradedAnswer]) -> StageOutcome:
    """Compares recorded rewards with what the reward functions say now."""
    functions = ", ".join(config.reward.weights) or "the reward functions"
    detail = f"{len(answers)} answers graded again by {functions}"
    try:
        results = _grade(config, [answer.item for answer in answers])
    except ServiceError as error:
        reason = f"the reward functions do not grade: {error}"
        return StageOutcome("rewards", "not compared", reason)

    for answer, result in zip(answers, results, strict=True):
        completion = answer.completion
        # A verdict is compared only where there is one: without it `correct` says nothing.
        is_same = (
            result.reward is not None
            and completion.reward == result.reward + answer.of_turns
            and (completion.correct == result.correct or not result.verified)
            and completion.components == result.components
        )
        if is_same:
            continue
        # Grading one answer twice tells a function that draws random numbers.
        (again,) = _grade(config, [answer.item])
        unsteady = [
            name for name, score in result.components.items() if score != again.components.get(name)
        ]
        if unsteady or result.reward != again.reward:
            who = ", ".join(unsteady) or "the reward"
            detail += f"; {who} is not deterministic: two calls, two scores"
        found = _shown(result.reward, result.components)
        return StageOutcome(
            "rewards",
            "differs",
            detail,
            answer.name,
            expected=_shown(completion.reward, completion.components),
            found=f"{found}: {result.reason}" if result.reason else found,
        )
    return StageOutcome("rewards", "equal", detail)


def _grade(config: Config, items: list[RewardItem]) -> list[RewardResult]:
    """Returns the results of the reward-server's own functions and workers."""

    async def grade() -> list[RewardResult]:
        found: list[RewardResult] = []
        async with RewardService(config.reward) as service:
            for start in range(0, len(items), _MAX_GRADE):
                found += await service.score(items[start : start + _MAX_GRADE])
        return found

    return asyncio.run(grade())


def _shown(reward: float | None, components: Mapping[str, float | None]) -> str:
    known = "none" if reward is None or math.isnan(reward) else repr(reward)
    parts = ", ".join(f"{name} {score}" for name, score in components.items())
    return f"{known} ({parts})" if parts else known
