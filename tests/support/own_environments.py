"""Environments for models without tools, and one for a model that hardly knows its tool."""

import asyncio
import itertools
from typing import Any

from examples.tool_calculator.calculator import Calculator

INSISTS = "python:tests.support.own_environments:Insists"
PONDERS = "python:tests.support.own_environments:Ponders"
OPEN_SESSION = "a-session-whose-name-is-known"
"""A session that the environment-server of sweeps keeps open from the start, like an episode's."""


class Insists:
    """Asks again and again; the reward depends on all answers."""

    def reset(self, ground_truth: str) -> str:
        """Begins."""
        self.asked, self.length = 0, 0
        return " Think."

    def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Asks three times."""
        self.asked += 1
        self.length += len(messages[-1]["content"])
        return "Are you sure?" if self.asked < 3 else None

    def get_reward(self) -> float:
        """Depends on all answers."""
        return (self.length % 7) / 7


class Ponders(Insists):
    """Takes its time and counts its turns in the reward, so that tests can compare the record with reality."""

    async def step(self, messages: list[dict[str, Any]]) -> str | None:  # type: ignore[override]
        """Asks three times, slowly."""
        await asyncio.sleep(0.15)
        return super().step(messages)

    def get_reward(self) -> dict[str, float]:  # type: ignore[override]
        """Depends on all answers."""
        return {"length": (self.length % 7) / 7, "steps": self.asked / 1000}


class Moody(Insists):
    """Fails for every other problem."""

    def reset(self, ground_truth: str) -> str:
        """Fails, perhaps."""
        if int(ground_truth) % 2 == 0:
            raise RuntimeError("no such task")
        return super().reset(ground_truth)


class Alternating(Calculator):
    """The calculator, with a reward for every other episode, whatever the model answers."""

    graded = itertools.count()

    def get_reward(self) -> float:
        """Alternates between 0 and 1."""
        return float(next(self.graded) % 2)
