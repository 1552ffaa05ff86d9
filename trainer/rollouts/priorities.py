"""What makes a group be reused more often: its priority for `POST /groups/sample`, as pure functions of the group and the
advantages of its completions.

Priorities are relative: the buffer takes them to the power of PRIORITY_EXPONENT and divides by their sum. None is
below MIN_PRIORITY, so a choice made here changes how often a group is reused and never excludes one.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real

from common.errors import ConfigError, shorten
from common.imports import import_callable
from common.schemas import Group

Priority = Callable[[Group, Sequence[float]], float]
"""(group, advantages) -> priority, finite and at least 0. There is one advantage per completion; for advantages by token
it is the mean |advantage| of the completion's tokens."""
MIN_PRIORITY = 1e-3
"""Of a group that scores less: seldom reused, never excluded."""
PRIORITY_EXPONENT, IMPORTANCE_EXPONENT = 0.6, 0.4
"""α and, at the first step, β of prioritised experience replay (Schaul et al. 2016); β rises linearly to 1."""
_MIN_REWARD_PRIORITY = 0.1
"""Of a group whose mean reward is 0 or less; the buffer's own sampling by reward starts from the same number."""


def by_advantage(group: Group, advantages: Sequence[float]) -> float:
    """Mean |advantage|: how much the group has to teach (the place of |TD error| in Schaul et al. 2016, arXiv:1511.05952).

    Advantages that are not finite give 0: their update is skipped and counted by the learner, and they say nothing.
    """
    mean = sum(abs(advantage) for advantage in advantages) / len(advantages)
    return mean if math.isfinite(mean) else 0.0


def by_reward(group: Group, advantages: Sequence[float]) -> float:
    """0.1 + the mean reward, or 0.1 where that is negative: high-reward experience more often, no other one never."""
    mean = sum(completion.reward for completion in group.completions) / len(group.completions)
    return _MIN_REWARD_PRIORITY + max(0.0, mean)


PRIORITIES: dict[str, Priority] = {"advantage": by_advantage, "reward": by_reward}


def load_priority(name: str) -> Priority:
    """The priority of that name, or the function at the import path `package.module:name`, never below MIN_PRIORITY.

    Raises ConfigError when there is none or it cannot be called. The function that is returned raises ConfigError when a
    function of an import path gives something other than a finite number of at least 0; what that function raises itself
    comes through.
    """
    function = PRIORITIES.get(name) or _imported(name)

    def priority(group: Group, advantages: Sequence[float]) -> float:
        return max(MIN_PRIORITY, _checked(function(group, advantages), group, name))

    return priority


def _imported(name: str) -> Priority:
    module, _, function = name.partition(":")
    if not module or not function:
        known = ", ".join(PRIORITIES)
        raise _refused("there is no such priority", name, f"take one of {known}, or write package.module:name")
    return import_callable(name, "replay.priority")


def _checked(value: object, group: Group, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number that no float holds
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise _refused(f"the priority of group {group.id} is {shorten(repr(value))}", name, "return a finite number of at least 0")


def _refused(message: str, name: str, remedy: str) -> ConfigError:
    return ConfigError(message, field="replay.priority", value=name, remedy=remedy)
