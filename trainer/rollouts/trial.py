"""A trial of the reward functions at the start of a run, before the model loads: a function that
always fails is named within seconds, and not once the first groups are generated.
"""

import asyncio
import logging
from collections.abc import Sequence

from common.clients.reward import RewardClient
from common.errors import ConfigError, ServiceError
from common.process.loop_thread import LoopThread
from common.settings.sections import RewardSection
from common.wire.schemas import Prompt, RewardItem, RewardResult
from services.reward.functions import RewardFunction, Score
from services.reward.hosts import ThreadHost
from services.reward.pool import CallFailed
from trainer.rollouts.requests import GeneratedAnswer, reward_items

log = logging.getLogger(__name__)
TRIAL_S = 15.0
"""Longest wait. A function may load a model or call a network first; that is no reason to stop."""


def try_functions(
    functions: Sequence[RewardFunction], prompt: Prompt, settings: RewardSection
) -> None:
    """Calls each of the caller's functions once, in this process, with two made-up answers to a
    problem. Raises ConfigError when one fails.
    """
    with LoopThread() as loop:
        for function in functions:
            loop.call(_try_function(function, _items(prompt, with_tokens=True), settings))


async def _try_function(
    function: RewardFunction, items: list[RewardItem], settings: RewardSection
) -> None:
    host = ThreadHost(function, settings.function_timeout_s, calls=1)
    try:
        async with asyncio.timeout(TRIAL_S):
            scores = await host.call_once(items)
    except TimeoutError:
        _warn_of(f"{function.name}: no answer within {TRIAL_S:.0f} s")
    except CallFailed as error:
        if error.status == "timeout":
            _warn_of(f"{function.name}: {error}")
        else:
            raise _failed(str(error) if error.always else f"{function.name}: {error}") from error
    else:
        if _all_failed(scores):
            raise _failed(f"{function.name}: {scores[0].reason}")


async def try_rewards(reward: RewardClient, prompt: Prompt) -> None:
    """Lets the reward-server grade two made-up answers to a problem. Raises ConfigError when a
    function fails for both.
    """
    try:
        async with asyncio.timeout(TRIAL_S):
            graded = await reward.batch_reward(_items(prompt, reward.gets_tokens))
    except TimeoutError:
        _warn_of(f"no answer within {TRIAL_S:.0f} s")
        return
    except ServiceError as error:
        # It concerns this problem only, whose group will be dropped and counted.
        log.warning("the reward functions could not be tried: %s", error)
        return

    ungraded = [result for result in graded.rewards if result.reward is None]
    if len(ungraded) < len(graded.rewards) or not _all_failed(ungraded):
        return
    reason = ungraded[0].reason
    if "no answer within" in reason:
        _warn_of(reason)
    else:
        raise _failed(reason)


def _items(prompt: Prompt, with_tokens: bool) -> list[RewardItem]:
    text = prompt.ground_truth or "0"
    answer = GeneratedAnswer(text, finish_reason="stop", tokens=None, token_ids=[0])
    return reward_items(prompt, [answer, answer], with_tokens)


def _all_failed(scores: Sequence[Score] | Sequence[RewardResult]) -> bool:
    """Whether all scores lack a number for a reason.

    A missing one without a reason is not the function's fault: a judge cannot be reached, or a
    sandbox is busy. Nor is a problem that no function grades.
    """
    return all(score.reason and score.status != "inapplicable" for score in scores)


def _failed(reason: str) -> ConfigError:
    return ConfigError(
        f"a reward function failed for a made-up answer: {reason}",
        field="reward.functions",
        remedy="correct the function, and test it by itself",
    )


def _warn_of(slow: str) -> None:
    remedy = "make the function faster, or raise reward.function_timeout_s"
    if slow.startswith("reward_model: "):
        remedy = "give the reward-server a GPU or a smaller model, or lower max_tokens"
    log.warning("warning: a reward function is slow: %s; if it stays so, %s", slow, remedy)
