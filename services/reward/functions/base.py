"""The interface of every reward function."""

from abc import ABC, abstractmethod
from typing import Any

Message = dict[str, str]
"""`{"role": …, "content": …}`"""


class RewardFunction(ABC):
    """Scores completions. To write your own: subclass it, name it, and return a number for every completion.

    On a cluster it is named by its import path (`--reward.functions package.module:Class`); in the Python API an instance
    is given to the trainer.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Of its component in metrics and results."""

    @abstractmethod
    def __call__(self, completions: list[list[Message]], **kwargs: Any) -> list[float]:
        """One score for each completion, higher is better.

        Args:
            completions: each as a chat, `[{"role": "assistant", "content": text}]`.
            kwargs: the data set's columns, each a list as long as `completions`: `ground_truth`, `prompt` and whatever else
                the rows have.

        Raises whatever goes wrong: an error is not a zero.
        """
