"""Grades the answers of a step again, with the reward functions of the run."""

import asyncio
import math
from collections.abc import Mapping, Sequence

import httpx

from common.clients.reward import RewardClient
from common.errors import ServiceError
from common.settings.config import Config
from common.wire.schemas import Completion, Group, Prompt, RewardItem, RewardResult
from services.reward.app import create_reward_app
from trainer.audit.comparison import Outcome
from trainer.rollouts.requests import reward_items

_BASE = "http://in-process"


def graded_again(config: Config, groups: Sequence[Group], prompts: Mapping[str, Prompt]) -> Outcome:
    """Compares the rewards of the groups with what the reward functions say now.

    Args:
        config: the settings of the run.
        groups: of single completions, whose text was graded.
        prompts: the rows of the data set by id, for functions that read their columns. A row that
            is not there is made from the group.
    """
    items: list[list[RewardItem]] = []
    for group in groups:
        plain = Prompt(id=group.prompt_id, prompt=group.prompt, ground_truth=group.ground_truth)
        row = prompts.get(group.prompt_id, plain)
        # The problem as the run recorded it: whether the row has changed is another stage.
        prompt = row.model_copy(update={"prompt": group.prompt, "ground_truth": group.ground_truth})
        items.append(reward_items(prompt, group.completions))
    try:
        results = _grade(config, items)
    except ServiceError as error:
        return Outcome("rewards", "not compared", f"the reward functions do not grade: {error}")

    names = ", ".join(config.reward.weights) or "math"
    count = 0
    for number, (group, of_group) in enumerate(zip(groups, results, strict=True)):
        for index, (completion, result) in enumerate(zip(group.completions, of_group, strict=True)):
            count += 1
            if _same(completion, result):
                continue
            again = _grade(config, [[items[number][index]]])[0][0]
            return Outcome(
                "rewards",
                "differs",
                f"{count} answers graded again by {names}" + _unsteady(result, again),
                f"group {number} ({group.id}), completion {index}",
                expected=_told(completion.reward, completion.components),
                found=_told(result.reward, result.components) + _reason(result),
            )
    return Outcome("rewards", "equal", f"{count} answers graded again by {names}")


def _grade(config: Config, batches: list[list[RewardItem]]) -> list[list[RewardResult]]:
    """Returns the results of every batch, from a reward-server in this process."""

    async def grade() -> list[list[RewardResult]]:
        app = create_reward_app(config.reward, config.max_body_mb << 20)
        client = RewardClient("reward-server", _BASE, transport=httpx.ASGITransport(app))
        async with app.router.lifespan_context(app), client:
            return [(await client.grade_all([batch]))[0] for batch in batches]

    return asyncio.run(grade())


def _same(completion: Completion, result: RewardResult) -> bool:
    if result.reward is None:
        return False
    return (
        completion.reward == result.reward
        and completion.correct == result.correct
        and completion.components == result.components
    )


def _told(reward: float | None, components: Mapping[str, float | None]) -> str:
    parts = ", ".join(f"{name} {score}" for name, score in components.items())
    known = "none" if reward is None or math.isnan(reward) else f"{reward!r}"
    return f"{known} ({parts})" if parts else known


def _reason(result: RewardResult) -> str:
    return f": {result.reason}" if result.reason else ""


def _unsteady(first: RewardResult, second: RewardResult) -> str:
    """Returns a remark when grading one answer twice gave two rewards; it names the functions."""
    if first.reward == second.reward and first.components == second.components:
        return ""
    names = [
        name for name in first.components if first.components[name] != second.components.get(name)
    ]
    return f"; {', '.join(names) or 'the reward'} is not deterministic: two calls gave two scores"
