"""A plain function as a reward function: `f(completions, prompts, **columns) -> list[float |
None]`, as in TRL.
"""

import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from common import Json
from common.process.daemon_threads import sent_on
from common.process.loop_thread import LoopThread
from services.reward.functions.base import (
    Columns,
    Completions,
    DetailedRewardFunction,
    Score,
    Scores,
    WrongScores,
    text_of,
)

Function = Callable[..., Any]


class FunctionLog(Protocol):
    """Gives plain functions the state of their run, and lets them log."""

    state: Any
    """The `trainer_state` of reward functions."""

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number; every step reports its mean."""

    def log_rows(self, rows: list[Json]) -> None:
        """Logs a row for every completion of a call."""


class PlainFunction(DetailedRewardFunction):
    """Calls a sync or async function with the arguments below that it accepts, each a list as long
    as `completions`.

    - `completions` and `prompts`: texts if the data set has texts, chats if it has chats,
    - the columns of the data set by name, `ground_truth`, and `completion_ids` if tokens are known,
    - with a `log` also `trainer_state`, `log_metric(name, value)` and `log_extra(column, values)`.

    None instead of a score means that the function does not apply to this completion. A function
    with the attribute `gives_verdicts` returns 1 for right and 0 for wrong.

    Args:
        function: the function; an async function runs in one event loop for all its calls.
        name: name of its component; the function's own when empty.
        log: log of the run, if there is one.
    """

    name = ""

    def __init__(self, function: Function, name: str = "", log: FunctionLog | None = None) -> None:
        self._function = function
        self.name = name or name_of(function)
        self._log = log
        self._loop: LoopThread | None = None
        self.gives_verdicts = bool(getattr(_unwrapped(function), "gives_verdicts", False))

        self._signature = inspect.signature(function)

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns what the function returns. Raises WrongScores for anything but a number or None
        for every completion.
        """
        chats = kwargs.pop("prompts", None) or [None] * len(completions)
        problems = kwargs.get("prompt") or [""] * len(completions)
        prompts = [chat or problem for chat, problem in zip(chats, problems, strict=True)]
        answers: list[Any] = [
            completion if chat else text_of(completion)
            for chat, completion in zip(chats, completions, strict=True)
        ]

        available = {**kwargs, "prompts": prompts, "completions": answers}
        if "answer" in self._signature.parameters and "ground_truth" in kwargs:
            # Loaders keep only the final answer.
            available.setdefault("answer", kwargs["ground_truth"])
        extra: Columns = {}
        if self._log is not None:
            available |= {
                "trainer_state": self._log.state,
                "log_metric": self._log.log_metric,
                "log_extra": extra.__setitem__,
            }

        values = self._function(**self._accepted(available))
        if inspect.isawaitable(values):
            values = self._awaited(values)
        scores = self.checked(values, len(completions))
        if extra and self._log is not None:
            self._log.log_rows(self._rows(prompts, answers, extra))
        return scores

    def _accepted(self, available: Json) -> Json:
        """Returns the arguments that the function takes. Raises WrongScores when one is missing."""
        parameters = self._signature.parameters
        accepted = {name: value for name, value in available.items() if name in parameters}
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            accepted = available
        try:
            self._signature.bind(**accepted)
        except TypeError as error:
            raise WrongScores(
                f"the reward function {self.name} is {error}; "
                f"there are {', '.join(sorted(available))}",
                field=self.name,
                remedy="give the data set a column of this name, or the argument a default",
            ) from None
        return accepted

    def _score_of(self, value: Any) -> Score:
        """Returns the score for a value; None means that the function does not apply."""
        return Score(None, "inapplicable") if value is None else super()._score_of(value)

    def _rows(self, prompts: list[Any], completions: list[Any], extra: Columns) -> list[Json]:
        rows: list[Json] = [
            {"function": self.name, "prompt": prompt, "completion": completion}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        for name, given in extra.items():
            values = list(given)
            if len(values) != len(completions):
                raise WrongScores(
                    f"the reward function {self.name} gave log_extra {len(values)} values of "
                    f"{name} for {len(completions)} completions",
                    field=self.name,
                    remedy="give log_extra one value for each completion",
                )
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        return rows

    def _awaited(self, values: Awaitable[Any]) -> Any:
        """Waits in this function's loop, because a judge's client, for example, belongs to the loop
        that created it.
        """
        if self._loop is None:
            self._loop = LoopThread(f"reward-{self.name}")
            self._loop.open()
            weakref.finalize(self, self._loop.close)

        async def result() -> Any:
            try:
                return await values
            except (SystemExit, KeyboardInterrupt) as ending:
                raise sent_on(ending) from ending

        return self._loop.call(result())


def name_of(function: Function) -> str:
    """Returns the name of a function, of the function inside a `partial`, or of a callable object's
    class.
    """
    function = _unwrapped(function)
    name = str(getattr(function, "__name__", type(function).__name__))
    return "lambda" if name == "<lambda>" else name


def _unwrapped(function: Function) -> Function:
    """Returns the function inside a `partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def numbered(names: Sequence[str]) -> list[str]:
    """Makes names distinct: the second `length` becomes `length_2`."""
    distinct: list[str] = []
    for i, name in enumerate(names):
        before = list(names[:i]).count(name)
        distinct.append(f"{name}_{before + 1}" if before else name)
    return distinct
