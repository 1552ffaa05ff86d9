"""The status of an answer in one grader that all tests of this file share: they only read."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.errors import InvalidInput
from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.service import RewardService

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


def boxed(answer: str, gold: str = "18") -> RewardItem:
    return RewardItem(response=f"\\boxed{{{answer}}}", ground_truth=gold)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader() -> AsyncIterator[RewardService]:
    async with RewardService(
        RewardSection(workers=2, functions=[MathReward(timeout_s=0.3)])
    ) as started:  # no good answer needs a worker
        yield started


async def test_one_hostile_answer_has_no_score(grader: RewardService) -> None:
    [result] = await grader.score([boxed("\\sum_{i=1}^{1000000000} \\frac{1}{i}", "x")])
    assert (result.status, result.reward, result.correct) == ("timeout", None, False)
    assert result.reason.startswith("math: no answer within")


async def test_a_hostile_gold_is_an_error_and_not_a_zero(grader: RewardService) -> None:
    [result] = await grader.score([boxed("5", "\\sum_{i=1}^{1000000000} \\frac{1}{i}")])
    assert (result.status, result.reward) == ("timeout", None)


async def test_batch_means_are_over_the_graded_ones(grader: RewardService) -> None:
    hang = boxed("\\sum_{i=1}^{1000000000} \\frac{1}{i}", "x")
    mixed = await grader.score_batch([boxed("18"), hang, boxed("19")])
    assert ([item.reward for item in mixed.rewards], mixed.mean_reward, mixed.accuracy) == (
        [1.0, None, 0.0],
        0.5,
        0.5,
    )
    none = await grader.score_batch([hang])
    assert ([item.reward for item in none.rewards], none.mean_reward, none.accuracy) == (
        [None],
        0.0,
        0.0,
    )


async def test_no_answer_is_unparsable_and_graded_zero(grader: RewardService) -> None:
    [result] = await grader.score([RewardItem(response="I cannot tell.", ground_truth="18")])
    assert (result.status, result.reward, result.extracted_answer) == ("unparsable", 0.0, None)


async def test_an_empty_ground_truth_is_named(grader: RewardService) -> None:
    with pytest.raises(InvalidInput) as caught:
        await grader.score([boxed("18"), boxed("18", " ")])
    assert caught.value.field == "items[1].ground_truth"
