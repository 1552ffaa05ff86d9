"""A custom reward function: rewards right answers, shorter ones more."""

from typing import Any

from services.reward.functions import MathRewardFunction, RewardFunction


class Brief(RewardFunction):
    """1 for a right answer, less 0.002 for every character of the completion."""

    name = "brief"

    def __init__(self) -> None:
        self.math = MathRewardFunction()

    def __call__(self, completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        """One number per completion. NaN (an answer that could not be graded) stays NaN: an error
        is not a zero.
        """
        scores = self.math(completions, **columns)
        lengths = [len(chat[-1]["content"]) for chat in completions]
        return [score - 0.002 * length for score, length in zip(scores, lengths, strict=True)]
