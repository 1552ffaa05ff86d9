"""Environments for models without tools, and one for a model that hardly knows its tool."""

import asyncio
import itertools
import random
from collections import Counter
from typing import Any, ClassVar

from examples.tool_calculator.calculator import Calculator

INSISTS = "python:tests.support.environments.own_environments:Insists"
PONDERS = "python:tests.support.environments.own_environments:Ponders"
OPEN_SESSION = "a-session-whose-name-is-known"
"""A session that the environment-server of sweeps keeps open from the start, like an episode's."""


class Insists:
    """Asks again and again. Every reward differs from the ones before it, whatever the model
    answers."""

    graded = itertools.count()

    def reset(self, ground_truth: str) -> str:
        """Begins."""
        self.asked = 0
        return " Think."

    def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Asks three times."""
        self.asked += 1
        return "Are you sure?" if self.asked < 3 else None

    def get_reward(self) -> float:
        """Counts the episodes."""
        return next(self.graded) % 97 / 97


class RewardsTurns:
    """Asks three times, and rewards every answer by its length, which it also says."""

    faults: ClassVar[list[Exception | None]] = []
    """What the next episodes raise."""

    def reset(self, ground_truth: str) -> str:
        """Begins, perhaps."""
        self.sizes: list[int] = []
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return " Think."

    def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Says the length of the last answer."""
        self.sizes.append(len(str(messages[-1]["content"])))
        return f"Are {self.sizes[-1]} letters enough?" if len(self.sizes) < 3 else None

    def get_turn_rewards(self) -> list[float]:
        """Rewards every answer."""
        return [size / 128 for size in self.sizes]

    def get_reward(self) -> float:
        """Counts the turns."""
        return len(self.sizes) / 4


class Ponders(Insists):
    """Takes its time and counts its turns in the reward, so that tests can compare the record with
    reality."""

    async def step(self, messages: list[dict[str, Any]]) -> str | None:  # type: ignore[override]
        """Asks three times, slowly."""
        await asyncio.sleep(0.15)
        return super().step(messages)

    def get_reward(self) -> dict[str, float]:  # type: ignore[override]
        """Counts the episodes and the turns of this one."""
        return {"graded": next(self.graded) % 97 / 97, "steps": self.asked / 1000}


class Moody(Insists):
    """Fails for every other problem."""

    def reset(self, ground_truth: str) -> str:
        """Fails, perhaps."""
        if int(ground_truth) % 2 == 0:
            raise RuntimeError("no such task")
        return super().reset(ground_truth)


class Unlucky(Insists):
    """Loses the first episode of every problem."""

    known: ClassVar[set[str]] = set()

    def reset(self, ground_truth: str) -> str:
        """Fails the first time."""
        if ground_truth not in self.known:
            self.known.add(ground_truth)
            raise RuntimeError("its machine is gone")
        return super().reset(ground_truth)


class TwiceUnlucky(Insists):
    """Loses the third to the sixth episode of every problem."""

    begun: ClassVar[Counter[str]] = Counter()

    def reset(self, ground_truth: str) -> str:
        """Fails, perhaps."""
        self.begun[ground_truth] += 1
        if 3 <= self.begun[ground_truth] <= 6:
            raise RuntimeError("its machine is gone")
        return super().reset(ground_truth)


class RewardsAtRandom(Calculator):
    """The calculator, with rewards of 0 and 1 at random, whatever the model answers."""

    rewards = random.Random(0)

    def get_reward(self) -> float:
        """Is 0 or 1."""
        return float(self.rewards.randrange(2))
