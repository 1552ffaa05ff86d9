"""A plain function as a reward function: `f(completions, prompts, **columns) -> list[float |
None]`, as in TRL.
"""

import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from common.process.loop_thread import LoopThread
from services.reward.functions.base import (
    DetailedRewardFunction,
    Message,
    Score,
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

    def log_rows(self, rows: list[dict[str, Any]]) -> None:
        """Logs a row for every completion of a call."""


class PlainFunction(DetailedRewardFunction):
    """Calls a sync or async function with the arguments below that it accepts, each a list as long
    as `completions`.

    - `completions` and `prompts`: texts if the data set has texts, chats if it has chats,
    - the columns of the data set by name, `ground_truth`, and `completion_ids` if tokens are known,
    - with a `log` also `trainer_state`, `log_metric(name, value)` and `log_extra(column, values)`.

    None instead of a score means that the function does not apply to this completion.

    Args:
        function: the function; an async function runs in one event loop for all its calls.
        name: name of its component; the function's own when empty.
        log: log of the run, if there is one.
    """

    def __init__(self, function: Function, name: str = "", log: FunctionLog | None = None) -> None:
        self._function, self._name, self._log = function, name or name_of(function), log
        taken = inspect.signature(function).parameters.values()
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in taken)
        self._names = {
            each.name
            for each in taken
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        plain = (
            each
            for each in taken
            if each.default is each.empty
            and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        )
        self._needed = [each.name for each in plain]
        self._loop: LoopThread | None = None

    @property
    def name(self) -> str:
        """Name of its component in metrics and results."""
        return self._name

    def rename(self, name: str) -> None:
        """Changes the name of its component, for when another function has the same name."""
        self._name = name

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Returns what the function returns. Raises WrongScores for anything but a number or None
        for every completion.
        """
        chats = kwargs.pop("prompts", None) or [None] * len(completions)
        problems = kwargs.get("prompt") or [""] * len(completions)
        prompts = [chat or problem for chat, problem in zip(chats, problems, strict=True)]
        answers = [
            chat if there else text_of(chat) for there, chat in zip(chats, completions, strict=True)
        ]
        available, extra = (
            {**kwargs, "prompts": prompts, "completions": answers},
            dict[str, list[Any]](),
        )
        if (
            "answer" in self._names and "ground_truth" in kwargs
        ):  # loaders keep only the final answer
            available.setdefault("answer", kwargs["ground_truth"])
        if self._log is not None:
            own = {
                "trainer_state": self._log.state,
                "log_metric": self._log.log_metric,
                "log_extra": extra.__setitem__,
            }
            available |= own
        if missing := [name for name in self._needed if name not in available]:
            raise WrongScores(
                f"the reward function {self.name} needs the argument {missing[0]}; there are {', '.join(sorted(available))}",
                field=self.name,
                remedy=f"give the data set a column {missing[0]}, or the argument a default",
            )
        values = self._function(
            **{
                name: value
                for name, value in available.items()
                if self._takes_all or name in self._names
            }
        )
        scores = self.checked(
            self._awaited(values) if inspect.isawaitable(values) else values, len(completions)
        )
        if extra and self._log is not None:
            self._log.log_rows(self._rows(prompts, answers, extra))
        return scores

    def checked(self, values: Any, count: int) -> list[Score]:
        """Returns scores for values; None means that the function does not apply. Raises
        WrongScores.
        """
        values = (
            values if values is None or isinstance(values, str | bytes | dict) else _listed(values)
        )
        applies = [value is not None for value in values] if isinstance(values, list) else []
        scores = super().checked(values, count)
        return [
            score if there else Score(None, "inapplicable")
            for score, there in zip(scores, applies, strict=True)
        ]

    def _rows(
        self, prompts: list[Any], completions: list[Any], extra: dict[str, list[Any]]
    ) -> list[dict[str, Any]]:
        columns = {name: list(values) for name, values in extra.items()}
        if wrong := [name for name, values in columns.items() if len(values) != len(completions)]:
            raise WrongScores(
                f"the reward function {self.name} gave log_extra {len(columns[wrong[0]])} values of {wrong[0]} for "
                f"{len(completions)} completions",
                field=self.name,
                remedy="give log_extra one value for each completion",
            )
        columns = {"prompt": prompts, "completion": completions, **columns}
        return [
            {"function": self.name, **{name: values[i] for name, values in columns.items()}}
            for i in range(len(prompts))
        ]

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
            except (
                SystemExit,
                KeyboardInterrupt,
            ) as ending:  # it would end the loop, and nobody would get a result
                raise RuntimeError(f"{type(ending).__name__}: {ending}") from ending

        return self._loop.call(result())


def name_of(function: Function) -> str:
    """Returns the name of a function, of the function inside a `partial`, or of a callable object's
    class.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return "function" if name == "<lambda>" else name


def numbered(names: Sequence[str]) -> list[str]:
    """Makes names distinct: the second `length` becomes `length_2`."""
    return [
        name if not (before := names[:i].count(name)) else f"{name}_{before + 1}"
        for i, name in enumerate(names)
    ]


def _listed(values: Any) -> Any:
    return list(values) if hasattr(values, "__iter__") else values
