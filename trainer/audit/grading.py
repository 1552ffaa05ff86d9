"""Grades the answers of a step again, with the reward functions of the run."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from common.clients.reward import RewardClient
from common.errors import ServiceError
from common.settings.config import Config
from common.wire.schemas import Completion, Group, Prompt, RewardItem, RewardResult
from services.reward.app import create_reward_app
from trainer.audit.comparison import StageOutcome
from trainer.audit.recorded import RecordedStep
from trainer.rollouts.requests import GeneratedAnswer, reward_items

_MAX_GRADE = 1024
"""Most answers in one call."""


@dataclass(frozen=True)
class GradedAnswer:
    """An answer that reward functions graded."""

    name: str
    """In messages."""
    item: RewardItem
    completion: Completion
    """With its recorded grade."""
    of_turns: float = 0.0
    """The part of the recorded reward that the environment gave for single turns."""


def row_of(group: Group, rows: Mapping[str, Prompt]) -> Prompt:
    """Returns the row of a group as the run recorded it, with the further columns that it has in
    the data set.
    """
    own = {"prompt": group.prompt, "ground_truth": group.ground_truth}
    row = rows.get(group.prompt_id)
    return row.model_copy(update=own) if row else Prompt(id=group.prompt_id, **own)


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
        return StageOutcome(
            "rewards", "not compared", f"the reward functions do not grade: {error}"
        )

    for answer, result in zip(answers, results, strict=True):
        if _same(answer, result):
            continue
        (again,) = _grade(config, [answer.item])
        completion = answer.completion
        return StageOutcome(
            "rewards",
            "differs",
            detail + _unsteady(result, again),
            answer.name,
            expected=_told(completion.reward, completion.components),
            found=_told(result.reward, result.components) + _reason(result),
        )
    return StageOutcome("rewards", "equal", detail)


def _grade(config: Config, items: list[RewardItem]) -> list[RewardResult]:
    """Returns the results of a reward-server in this process."""

    async def grade() -> list[RewardResult]:
        app = create_reward_app(config.reward, config.max_body_mb << 20)
        transport = httpx.ASGITransport(app)
        client = RewardClient("reward-server", "http://in-process", transport=transport)
        async with app.router.lifespan_context(app), client:
            found: list[RewardResult] = []
            for start in range(0, len(items), _MAX_GRADE):
                (results,) = await client.grade_all([items[start : start + _MAX_GRADE]])
                found += results
            return found

    return asyncio.run(grade())


def _same(answer: GradedAnswer, result: RewardResult) -> bool:
    completion = answer.completion
    if result.reward is None:
        return False
    return (
        completion.reward == result.reward + answer.of_turns
        and (completion.correct == result.correct or not result.verified)
        and completion.components == result.components
    )


def _told(reward: float | None, components: Mapping[str, float | None]) -> str:
    known = "none" if reward is None or math.isnan(reward) else repr(reward)
    parts = ", ".join(f"{name} {score}" for name, score in components.items())
    return f"{known} ({parts})" if parts else known


def _reason(result: RewardResult) -> str:
    return f": {result.reason}" if result.reason else ""


def _unsteady(first: RewardResult, second: RewardResult) -> str:
    """Returns a remark when grading one answer twice gave two rewards; it names the functions."""
    names = [
        name for name, score in first.components.items() if score != second.components.get(name)
    ]
    if first.reward == second.reward and not names:
        return ""
    return f"; {', '.join(names) or 'the reward'} is not deterministic: two calls, two scores"
