"""An environment with one tool: `environment.name
python:examples.tool_calculator.calculator:Calculator`.
"""

from typing import Any


class Calculator:
    """A product of two numbers that are too large for a tiny model. The answer is `#### N` and
    nothing else.

    It grades itself: the math reward compares values, so a model could learn to answer `#### 4739 *
    8526`.
    """

    gives_verdicts = True

    def reset(self, ground_truth: str) -> None:
        """Begins an episode."""
        self._wanted = f"#### {ground_truth}"
        self._answer = ""

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: One number.
            b: Another number.
        """
        return a * b

    def step(self, messages: list[dict[str, Any]]) -> None:
        """Keeps an answer without a tool call, which ends the episode."""
        self._answer = messages[-1]["content"]

    def get_reward(self) -> float:
        """Returns 1 for the right answer, else 0."""
        return float(self._answer == self._wanted)
