"""Reward functions as users write them; the workers of the reward-server import this file."""

import os
import time
from typing import Any

from services.reward.functions import RewardFunction


class KeywordReward(RewardFunction):
    """A user's own function in the style of the documentation; reads another column of the data
    set."""

    @property
    def name(self) -> str:
        return "keyword"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(word in text) for word, text in zip(kwargs["keyword"], texts, strict=True)]


class Moody(RewardFunction):
    """Does what the completion says: raises, hangs, dies, returns nonsense or prints; otherwise
    scores 0.5."""

    name = "moody"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        print("a function may print", input() if kwargs.get("read") else "")
        return [self._score(completion[0]["content"]) for completion in completions]

    def _score(self, text: str) -> float:
        if text == "raise":
            raise ValueError("no\nscore")
        if text == "hang":
            time.sleep(1000)
        if text == "die":
            os._exit(1)
        return {"nan": float("nan"), "inf": float("inf")}.get(text, 0.5)


class TooFew(RewardFunction):
    """Returns too few numbers."""

    name = "too_few"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return []


class NeedsArguments(RewardFunction):
    """The reward-server cannot construct it."""

    name = "needs_arguments"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [self.threshold] * len(completions)


class NotAFunction:
    """Not a RewardFunction."""


def plain_length(completions: list[str]) -> list[float | None]:
    """A plain function that does not apply to empty completions."""
    return [len(text) or None for text in completions]


def dice(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Gives another score at every call."""
    return [float.fromhex(f"0x0.{os.urandom(4).hex()}p0") for _ in completions]
