"""Prioritised reuse: the requests to the replay-buffer, and the priorities of groups.

A priority is a pure function of a group and the advantages of its completions. Priorities are
relative: the replay-buffer takes them to the power of PRIORITY_EXPONENT and divides by their sum.
Groups of priority 0 are not reused.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real

from common.errors import ConfigError, shorten
from common.process.imports import named_or_imported
from common.settings.config import Config
from common.wire.schemas import Group, SampleRequest

Priority = Callable[[Group, Sequence[float]], float]
"""(group, mean |advantage| of each completion) -> priority, finite and at least 0."""
PRIORITY_EXPONENT = 0.6
"""α of prioritised experience replay (Schaul et al. 2016)."""
IMPORTANCE_EXPONENT = 0.4
"""Its β at the first step."""


def reuse_request(
    config: Config, count: int, step: int, total_steps: int, request_id: str
) -> SampleRequest:
    """Returns the request for `count` groups to reuse in the update after `step` of `total_steps`.

    β rises linearly from IMPORTANCE_EXPONENT at the first step to 1 at the last.
    """
    settings = config.replay
    progress = min(1.0, step / max(1, total_steps - 1))
    return SampleRequest(
        count=count,
        min_version=max(0, step - settings.max_reuse_staleness),
        priority_exponent=PRIORITY_EXPONENT,
        importance_exponent=IMPORTANCE_EXPONENT + (1 - IMPORTANCE_EXPONENT) * progress,
        max_times_sampled=settings.max_times_sampled,
        seed=config.seed * 1_000_003 + step,
        request_id=request_id,
        step=step,
    )


def by_advantage(group: Group, advantages: Sequence[float]) -> float:
    """Returns the mean |advantage|, in place of |TD error| (Schaul et al. 2016, arXiv:1511.05952);
    0 if not finite.
    """
    mean = sum(abs(advantage) for advantage in advantages) / len(advantages)
    return mean if math.isfinite(mean) else 0.0


def by_reward(group: Group, advantages: Sequence[float]) -> float:
    """Returns 0.1 + max(0, mean reward), as in the replay-buffer's own sampling by reward."""
    mean = sum(answer.reward for answer in group.answers) / len(group.answers)
    return 0.1 + max(0.0, mean)


PRIORITIES: dict[str, Priority] = {"advantage": by_advantage, "reward": by_reward}


def load_priority(name: str) -> Priority:
    """Returns the priority of that name, or the function at the import path `package.module:name`.

    With any function, a group whose advantages are all 0, and so has no policy gradient, gets
    priority 0.

    Raises ConfigError when there is none or it cannot be called. The returned function raises
    ConfigError when an imported function returns anything but a finite number of at least 0; errors
    raised by that function propagate.
    """
    function = named_or_imported(name, PRIORITIES, "replay.priority")

    def priority(group: Group, advantages: Sequence[float]) -> float:
        value: object = function(group, advantages)
        number = math.nan
        if isinstance(value, Real) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # an integer beyond all floats
                number = math.inf
        if not 0 <= number < math.inf:
            raise ConfigError(
                f"the priority of group {group.id} is {shorten(repr(value))}",
                field="replay.priority",
                value=name,
                remedy="return a finite number of at least 0",
            )
        return number if any(advantages) else 0.0

    return priority
