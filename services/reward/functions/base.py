"""The interface of every reward function."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidInput
from services.reward.score import Score

Message = dict[str, str]
"""`{"role": …, "content": …}`"""


class RewardFunction(ABC):
    """Scores completions. To write your own: subclass it, name it, and return a number for every completion.

        class Short(RewardFunction):
            name = "short"

            def __call__(self, completions, **kwargs):
                return [1.0 if len(text_of(completion)) < 200 else 0.0 for completion in completions]

    On a cluster it is named by its import path (`--reward.functions package.module:Class`) and is made without arguments
    in every worker process of the reward-server; in the Python API an instance is given to the trainer.
    """

    bounds_itself: bool = False
    """Whether every call ends by itself in good time. The reward-server gives others `reward.function_timeout_s`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Of its component in metrics and results."""

    @abstractmethod
    def __call__(self, completions: list[list[Message]], **kwargs: Any) -> list[float]:
        """One score for each completion, higher is better; NaN for one that could not be scored.

        Args:
            completions: each as a chat, `[{"role": "assistant", "content": text}]`.
            kwargs: the data set's columns, each a list as long as `completions`: `ground_truth`, `prompt` and whatever else
                the rows have. None stands where a row lacks a column that others have.

        Raises whatever goes wrong: an error is not a zero.
        """

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """`__call__`, with what the function knows beyond the number.

        Raises InvalidInput when it did not return a number for every completion.
        """
        return as_scores(self.name, self(completions, **kwargs), len(completions))


def as_scores(name: str, values: Sequence[float | None], count: int) -> list[Score]:
    """Scores out of the numbers of a function; NaN, infinity and None are errors of these completions.

    Raises InvalidInput when there are not `count` numbers.
    """
    if len(values) != count:
        raise InvalidInput(
            f"the reward function {name} returned {len(values)} scores for {count} completions",
            field=name,
            remedy="return one number for each completion",
        )
    return [Score(float(value)) if value is not None and math.isfinite(value) else Score(None, "error") for value in values]


def as_floats(scores: Sequence[Score]) -> list[float]:
    """The numbers of scores, NaN for those that could not be had."""
    return [math.nan if score.value is None else score.value for score in scores]


def text_of(completion: Sequence[Message]) -> str:
    """The text of a completion: what its assistant messages say, one after the other."""
    return "".join(message["content"] for message in completion if message.get("role", "assistant") == "assistant")


def column(kwargs: dict[str, Any], name: str, count: int, function: str) -> list[Any]:
    """A column that a function needs. Raises InvalidInput when it is absent or has another length."""
    values = kwargs.get(name)
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Sequence) or len(values) != count:
        raise InvalidInput(
            f"the reward function {function} needs a list {name} as long as the completions",
            field=name,
            value=values,
            remedy=f"give the data set a column {name}",
        )
    return list(values)
