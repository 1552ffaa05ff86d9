"""A trial of the reward functions before the model of a run is loaded: a function that always fails
is named within seconds, and not once the first groups are generated.
"""

import asyncio
import logging

from common.clients.reward import RewardClient
from common.errors import ConfigError, ServiceError
from common.wire.schemas import Prompt, RewardItem
from trainer.rollouts.requests import GeneratedAnswer, reward_items

log = logging.getLogger(__name__)
TRIAL_S = 15.0
"""Longest wait. A function may load a model or call a network first; that is no reason to stop."""


async def try_rewards(reward: RewardClient, prompt: Prompt) -> None:
    """Lets the reward-server grade two made-up answers to a problem. Raises ConfigError when a
    function fails for both.

    A missing reward without a reason is not the function's fault: a judge cannot be reached, or a
    sandbox is busy. Nor is a problem that no function grades. A function that is only slow gets a
    warning.
    """
    try:
        async with asyncio.timeout(TRIAL_S):
            graded = await reward.batch_reward(made_up(prompt, reward.gets_tokens))
    except TimeoutError:
        warn_of_slow(f"no answer within {TRIAL_S:.0f} s")
        return
    except ServiceError as error:
        # It concerns this problem only, whose group will be dropped and counted.
        log.warning("the reward functions could not be tried: %s", error)
        return

    failed = (
        result.reward is None and result.reason and result.status != "inapplicable"
        for result in graded.rewards
    )
    if not all(failed):
        return
    first = graded.rewards[0]
    if first.status == "timeout":
        warn_of_slow(first.reason)
    else:
        raise failed_trial(first.reason)


def made_up(prompt: Prompt, with_tokens: bool) -> list[RewardItem]:
    """Returns two equal answers: a function that returns one score for any number fails."""
    text = prompt.ground_truth or "0"
    answer = GeneratedAnswer(text, finish_reason="stop", tokens=None, token_ids=[0])
    return reward_items(prompt, [answer, answer], with_tokens)


def failed_trial(reason: str) -> ConfigError:
    """Returns the error for a function that failed for a `reason`, which names it."""
    return ConfigError(
        f"a reward function failed for a made-up answer: {reason}",
        field="reward.functions",
        remedy="correct the function, which returns a list with a number for each completion, and "
        "test it by itself",
    )


def warn_of_slow(reason: str) -> None:
    """Logs a warning of a function that took too long, which the `reason` names."""
    log.warning(
        "warning: a reward function is slow: %s; if it stays so, make the function faster (for "
        "reward_model, give the reward-server a GPU or a smaller model, or lower max_tokens), or "
        "raise reward.function_timeout_s",
        reason,
    )
