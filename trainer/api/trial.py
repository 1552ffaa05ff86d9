"""A trial of the caller's own reward functions, before the model is loaded."""

import asyncio
from collections.abc import Sequence

from common.errors import ConfigError, InvalidInput
from common.process.loop_thread import LoopThread
from common.settings.sections import RewardSection
from common.wire.schemas import Prompt
from services.reward.functions import RewardFunction
from services.reward.functions.base import WrongScores
from services.reward.hosts import ThreadHost
from services.reward.pool import CallFailed
from trainer.rollouts.trial import TRIAL_S, failed_trial, made_up, warn_of_slow


def try_functions(
    functions: Sequence[RewardFunction], prompt: Prompt, settings: RewardSection
) -> None:
    """Calls each function once, in this process, with two made-up answers to a problem.

    Raises ConfigError when one fails, as `trainer.rollouts.trial` does for the functions of a
    reward-server.
    """
    with LoopThread() as loop:
        for function in functions:
            loop.call(_try_function(function, prompt, settings))


async def _try_function(function: RewardFunction, prompt: Prompt, settings: RewardSection) -> None:
    host = ThreadHost(function, settings.function_timeout_s, calls=1)
    name = function.name
    try:
        async with asyncio.timeout(TRIAL_S):
            scores = await host.call(made_up(prompt, with_tokens=True))
    except TimeoutError:
        warn_of_slow(f"{name}: no answer within {TRIAL_S:.0f} s")
        return
    except CallFailed as error:
        if error.status == "timeout":
            warn_of_slow(f"{name}: {error}")
            return
        cause = error.__cause__
        if isinstance(cause, InvalidInput) and not isinstance(cause, WrongScores):
            raise ConfigError(
                f"{name} cannot grade answers to {prompt.id}: {cause.message}",
                field="train_dataset",
                value=f"{prompt.id}, column {(cause.field or '').removeprefix('items[0].')}",
                remedy="repair this column of the data set, or give another reward function",
            ) from error
        # What fails for any answers names the function itself.
        raise failed_trial(str(error) if error.always else f"{name}: {error}") from error

    if all(score.reason and score.status != "inapplicable" for score in scores):
        raise failed_trial(f"{name}: {scores[0].reason}")
