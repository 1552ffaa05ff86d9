"""Grades every ground truth of a data set against itself, as a run does at its start."""

import asyncio

from common.errors import ConfigError
from common.process.topology import DATA, REWARD
from common.wire.schemas import Prompt
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, Results

_FIX = "correct the row, or name another column (data.answer_field)"


def check_ground_truths(plan: Plan) -> Results:
    """Yields a line for each problem that no answer solves, and one for all of them.

    Raises ConfigError when the data or the reward functions cannot be loaded.
    """
    data = plan.job(DATA)
    reward = plan.job(REWARD)
    if data is None or reward is None:
        raise ConfigError(
            "the job group has no data-server or no reward-server on this machine",
            field="--data",
            remedy="leave out --task",
        )
    # It imports the data set's libraries, which take seconds.
    from services.data.loaders import load_split

    prompts: list[Prompt] = []
    for split in ("train", "eval"):
        prompts += load_split(data.config.data, split, data.config.seed)
    unsolvable, repaired = asyncio.run(_checked(reward, prompts))
    for name, reason in unsolvable.items():
        yield Result(f"row {name}", "warn", reason, _FIX)
    gradable = len(prompts) - len(unsolvable)
    yield Result(
        "ground truths",
        "ok",
        f"{gradable:,} of {len(prompts):,} can be graded, {repaired:,} of them after a repair",
    )


async def _checked(reward: PlannedTask, prompts: list[Prompt]) -> tuple[dict[str, str], int]:
    from services.reward.service import RewardService
    from trainer.rollouts.ground_truths import PAGE, check_prompts

    unsolvable: dict[str, str] = {}
    repaired = 0
    async with RewardService(reward.config.reward) as scorer:
        for begin in range(0, len(prompts), PAGE):
            page = prompts[begin : begin + PAGE]
            found, count = await check_prompts(page, scorer.check_ground_truths)
            unsolvable |= found
            repaired += count
    return unsolvable, repaired
