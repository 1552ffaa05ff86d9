"""The interface of reward functions."""

import inspect
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Json
from common.errors import ConfigError, InvalidInput, shorten
from common.process import daemon_threads
from common.wire.schemas import RewardStatus

_MAX_REASON_CHARS = 500
_MAX_FRAMES = 8
# Folders with the frames between a reward function of a user and its caller.
_OURS = (
    Path(__file__).resolve().parents[1],
    Path(daemon_threads.__file__).resolve().parent,
)
_LARGEST = 3e38  # of a float32, in which the trainer computes
# `{"role": …, "content": …}`
Message = dict[str, str]
# Completions of a call, each as a chat: the messages of an answer or an episode.
Completions = list[list[Message]]
# The data set's columns of a call, each with a cell for every completion.
Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a reward function for one completion."""

    value: float | None
    """Higher is better; None when the function failed. An error is not a zero."""
    status: RewardStatus = "ok"
    correct: bool | None = None
    """Verdict of a function that verifies (math, code); None for one that does not."""
    answer: str | None = None
    """What was verified: the extracted answer, or the outcome of every test case."""
    components: dict[str, float | None] = field(default_factory=dict)
    """Score of every part of a composite by its name, before weights."""
    reason: str = ""
    """Why there is no value, or why only the same text earns it."""

    def __post_init__(self) -> None:
        """Converts the values to plain numbers; a value that does not fit in a float32 is an
        error.
        """
        value = _number(self.value)
        if value is None and self.status in ("ok", "unparsable", "unevaluated"):
            object.__setattr__(self, "status", "error")
        components = {name: _number(part) for name, part in self.components.items()}
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "components", components)


Scores = list[Score]


def own_copy(value: Any) -> Any:
    """Copies the lists and dictionaries of a completion or column. A function may change its
    arguments, which the next function, call or answer must not see.
    """
    if isinstance(value, list):
        return [own_copy(each) for each in value]
    if isinstance(value, dict):
        return {name: own_copy(each) for name, each in value.items()}
    return value  # also an environment, which is the caller's own


class WrongScores(InvalidInput):
    """A reward function did not return one number per completion. It would not for any other
    completions either, so they are not tried one by one.
    """


def _number(value: Any) -> float | None:
    """Converts a number of any type (NumPy, torch, Decimal, bool) to a float. Returns None if it is
    no number or exceeds float32.
    """
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except Exception:  # a user's own type may raise anything
        return None
    return number if abs(number) <= _LARGEST else None


class RewardFunction(ABC):
    """Scores completions. To write your own: subclass it, name it, and return a number for every
    completion.

        class Short(RewardFunction):
            name = "short"

            def __call__(self, completions, **kwargs):
                lengths = [len(text_of(completion)) for completion in completions]
                return [1.0 if length < 200 else 0.0 for length in lengths]

    On a cluster it is named by its import path (`--reward.functions package.module:Class`) and
    created without arguments in every worker process of the reward-server; with the Python API you
    pass an instance to the trainer.
    """

    bounds_itself: bool = False
    """Whether every call limits its own time. Otherwise the reward-server applies
    `reward.function_timeout_s`."""

    gives_verdicts: bool = False
    """Whether every score is a verdict: 1 for a right completion, 0 for a wrong one. A run has an
    accuracy only with such a function."""

    verifies_answers: bool = False
    """Whether it compares a final answer with `ground_truth`. At the start of a run every ground
    truth is then graded against itself."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of its component in metrics and results."""

    @abstractmethod
    def __call__(self, completions: Completions, **kwargs: Any) -> list[float]:
        """Returns one score for each completion, higher is better; NaN for one that could not be
        scored.

        It may raise any exception: an error is not a zero.

        Args:
            completions: each as a chat, `[{"role": "assistant", "content": text}]`; the functions
                of this package also take texts.
            kwargs: the data set's columns, each a list as long as `completions`: `ground_truth`,
                `prompt` and the further columns of the rows. None stands where a row lacks a column
                that others have.
        """

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns the results of `__call__`, with verdicts and details if the function has them.

        Raises WrongScores when it does not return a number for every completion.
        """
        return self.checked(self(completions, **kwargs), len(completions))

    def checked(self, values: Any, count: int) -> Scores:
        """Returns scores for the values that a function returned. Raises WrongScores for anything
        but `count` of them.
        """
        if inspect.iscoroutine(values):
            values.close()
            problem = "is a coroutine: define it with def, not async def"
        elif isinstance(values, Iterable) and not isinstance(values, str | bytes | dict):
            values = list(values)
            problem = "" if len(values) == count else f"returned {len(values)} scores"
        else:
            problem = f"returned {'None' if values is None else f'a {type(values).__name__}'}"
        if problem:
            raise WrongScores(
                f"the reward function {self.name} {problem} for {count} completions",
                field=self.name,
                remedy="return a list with one number for each completion, "
                "NaN for one that has no score",
            )
        return [self._score_of(value) for value in values]

    def _score_of(self, value: Any) -> Score:
        number = _number(value)
        if number is None:
            return Score(None, reason=f"{value!r:.80} is not a number")
        if not self.gives_verdicts:
            return Score(number)
        if number not in (0.0, 1.0):
            raise WrongScores(
                f"the reward function {self.name} declares that it gives verdicts, but returned "
                f"{value!r:.80}",
                field=self.name,
                remedy="return 1 for right and 0 for wrong, or remove gives_verdicts",
            )
        return Score(number, correct=number == 1.0)


def reason_of(error: Exception) -> str:
    """Returns an error with the file and the line of the function that raised it."""
    if isinstance(error, WrongScores):
        return error.message
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame
        for frame in frames
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _OURS)
    ]
    where = "".join(traceback.format_list((users or frames)[-_MAX_FRAMES:]))
    return f"{type(error).__name__}: {shorten(str(error), _MAX_REASON_CHARS)}\n{where}".rstrip()


class DetailedRewardFunction(RewardFunction):
    """Base class of functions whose `scores` contain more than numbers."""

    def __call__(self, completions: Completions, **kwargs: Any) -> list[float]:
        """Returns the values of `scores`, NaN for None. Raises as `scores` does."""
        scores = self.scores(completions, **kwargs)
        return [math.nan if score.value is None else score.value for score in scores]

    @abstractmethod
    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns a score for each completion."""


def text_of(completion: Sequence[Message] | str) -> str:
    """Returns the text of a completion: its assistant messages, joined.

    A function that is called by hand may get the text alone.
    """
    if isinstance(completion, str):
        return completion
    own = [each for each in completion if each.get("role", "assistant") == "assistant"]
    return "".join(message["content"] for message in own)


def check_positive(**arguments: float) -> None:
    """Raises ConfigError naming the first argument that is not above 0."""
    for name, value in arguments.items():
        if value <= 0:
            raise ConfigError(f"{name} is not above 0", field=name, value=value, remedy="raise it")


def column(kwargs: Json, name: str, count: int, function: str) -> list[Any]:
    """Returns a column that a function needs. Raises InvalidInput when it is absent or has another
    length.
    """
    values = kwargs.get(name)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != count:
        raise InvalidInput(
            f"the reward function {function} needs a list {name} with one item per completion",
            field=name,
            value=values,
            remedy=f"give the data set a column {name}",
        )
    return list(values)
