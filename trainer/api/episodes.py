"""Reads the environments and tools that callers of the Python API give, and grades their
episodes.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from common import Json
from common.errors import ConfigError, shorten
from common.settings.sections import RewardSection
from common.wire.schemas import EpisodeTask, RewardItem
from services.environment.environments import Environment
from services.environment.outcome import EpisodeFailed
from services.reward.functions import RewardFunction
from services.reward.service import RewardService
from trainer.api.refusals import with_names

_NAME = "environment.name"


class EpisodeGrader:
    """Grades episodes as TRL does: reward functions get all messages after the prompt, and the
    environment as `environments`. Unlike in TRL, a call has only one episode.

    Args:
        config: settings of the functions, and their weights.
        functions: grade the episodes.
    """

    def __init__(self, config: RewardSection, functions: Sequence[RewardFunction]) -> None:
        self._scorer = RewardService(config, functions=functions)

    async def __call__(
        self, environment: Any, task: EpisodeTask, messages: list[Any], token_ids: Sequence[int]
    ) -> tuple[float, dict[str, float | None]]:
        """Returns the reward and the score of each function. Raises EpisodeFailed."""
        given = {"environments": environment, "completion_ids": [int(each) for each in token_ids]}
        content: Json = {
            "prompt": task.prompt,
            "response": messages,
            "ground_truth": task.ground_truth,
            "finish_reason": "stop",
            "task": "",
            "columns": task.columns | given,
        }
        item = RewardItem.model_construct(**content)  # stays in this process, with its objects
        (result,) = await self._scorer.score([item])
        if result.reward is None:
            raise EpisodeFailed(f"an episode could not be graded: {result.reason or result.status}")
        return result.reward, result.components


def takes_environments(reward_fn: Any) -> bool:
    """Returns whether a reward function has an argument `environments`."""
    functions = reward_fn if isinstance(reward_fn, list | tuple) else [reward_fn]
    for function in functions:
        is_function = callable(function) and not inspect.isclass(function)
        if is_function and "environments" in inspect.signature(function).parameters:
            return True
    return False


class EnvironmentReward(RewardFunction):
    """Placeholder for the rewards that an environment computes itself."""

    name = "environment"

    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        """Called only for the trial answers at the start of a run: an episode has its environment's
        reward or fails.
        """
        return [0.0] * len(completions)


def as_environment(factory: Any, tools: Sequence[Any] | None) -> Environment | None:
    """Returns the environment for a class, a function that makes one, or tools; None when none is
    given.

    Raises ConfigError when they conflict with one another.
    """
    if factory is None and not tools:
        return None
    if factory is None:
        for tool in tools or ():
            if not inspect.isroutine(tool):
                raise ConfigError(
                    "this is not a function",
                    field="tools",
                    value=shorten(tool),
                    remedy="give functions with types and a docstring, or an environment_factory",
                )
        with _argument("tools"):
            return Environment.of_functions(tools or (), _path(tools or ()))
    if tools:
        raise ConfigError(
            "an environment_factory brings its own tools",
            field="tools",
            value=shorten(tools),
            remedy="make the tools methods of the environment",
        )
    if not callable(factory):
        raise ConfigError(
            "this cannot make environments",
            field="environment_factory",
            value=shorten(factory),
            remedy="give a class with reset(**columns), or a function that makes one environment",
        )
    kind = factory if inspect.isclass(factory) else type(factory())
    with _argument("environment_factory"):
        return replace(Environment.of(kind, _path([factory])), make=factory)


@contextmanager
def _argument(name: str) -> Iterator[None]:
    """Replaces the field of an error by the argument's name."""
    try:
        yield
    except ConfigError as error:
        raise with_names(error, {error.field or "": name}) from None


def _path(made: Sequence[Any]) -> str:
    """Returns the environment name that a run records; it is never imported."""
    names = [getattr(each, "__name__", type(each).__name__).strip("<>") for each in made]
    return f"python:{getattr(made[0], '__module__', 'given')}:{'_'.join(names)}"


def with_environment(environment: Environment | None, settings: Json) -> Json:
    """Returns settings that record the run's environment. Raises ConfigError for another or a
    missing environment.
    """
    if environment is None:
        for name in settings:
            if name.startswith("environment.") and not settings.get(_NAME):
                raise ConfigError(
                    "this trainer has no environment, which this setting needs",
                    field=name,
                    value=settings[name],
                    remedy="leave it out, or give tools or an environment_factory",
                )
        return settings
    if settings.get(_NAME, environment.name) != environment.name:
        raise ConfigError(
            "the arguments give another environment",
            field=_NAME,
            value=settings[_NAME],
            remedy="leave one of them out",
        )
    return settings | {_NAME: environment.name}
