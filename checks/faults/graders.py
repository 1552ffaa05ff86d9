"""Reward functions as users write them, which misbehave; worker processes of the reward-server
import this file.
"""

import os
import re
import resource
import time
from collections.abc import Callable
from typing import Any

from services.reward.functions import RewardFunction

_EVERY = 7
_EATEN = 1 << 34


class _Misbehaves(RewardFunction):
    """Counts digits, and does something else for problems whose answer is a multiple of seven."""

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        """Returns a score for every completion."""
        scores = []
        for completion, truth in zip(completions, kwargs["ground_truth"], strict=True):
            # A first call with made-up answers only looks whether the function works.
            if int(truth) % _EVERY == 0 and completion[0]["content"] != truth:
                self.misbehave()
            scores.append(sum(map(str.isdigit, completion[0]["content"])) / 10)
        return scores

    misbehave: Callable[[], Any]


class Dies(_Misbehaves):
    """Ends its process, as a crash of a library does."""

    name = "dies"

    def misbehave(self) -> None:
        """Dies."""
        os._exit(11)


class Sleeps(_Misbehaves):
    """Never returns."""

    name = "sleeps"

    def misbehave(self) -> None:
        """Sleeps."""
        time.sleep(3600)


class Backtracks(_Misbehaves):
    """Is stuck in the interpreter, which holds its lock."""

    name = "backtracks"

    def misbehave(self) -> None:
        """Matches for ever."""
        re.match(r"(a+)+$", "a" * 60 + "!")


class Eats(_Misbehaves):
    """Allocates more memory than a machine has."""

    name = "eats"

    def misbehave(self) -> None:
        """Allocates, with a limit in place of a small machine."""
        resource.setrlimit(resource.RLIMIT_AS, (_EATEN, _EATEN))
        bytearray(2 * _EATEN)
