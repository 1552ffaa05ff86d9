"""Where a reward function runs in the reward-server: in threads of it, or in worker processes that can be killed.

Both give a call a deadline, cut large batches, and when a call fails call again for every item alone: one bad item never
harms the others.
"""

import asyncio
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from common.errors import InvalidInput, Overloaded
from common.schemas import RewardItem, RewardStatus
from services.reward.functions.base import Message, RewardFunction
from services.reward.pool import WorkerPool
from services.reward.score import Score

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TAKEN = frozenset(("self", "completions"))
Check = Callable[[RewardItem, str], object]
"""Raises InvalidInput for an item that the function cannot score, naming the field under the prefix."""


class CallFailed(Exception):
    """A call of a reward function gave no scores."""

    def __init__(self, status: RewardStatus, reason: str) -> None:
        self.status = status
        super().__init__(reason)


class Host(ABC):
    """One reward function of the server.

    Args:
        name: of its component.
        check: of every item before it is accepted.
    """

    def __init__(self, name: str, check: Check | None = None) -> None:
        self.name, self._check = name, check
        self.unfinished = 0
        """Items that wait or are scored now."""

    @property
    def problem(self) -> str | None:
        """Why it cannot score now, or None."""
        return None

    def check(self, item: RewardItem, where: str) -> None:
        """Raises InvalidInput naming a field under the prefix `where`."""
        for name in _TAKEN.intersection(item.columns):
            raise InvalidInput(
                "a reward function has an argument of this name", field=f"{where}columns.{name}", remedy="rename the column"
            )
        if self._check is not None:
            self._check(item, where)

    @abstractmethod
    async def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores in order. Raises Overloaded when too many items wait already."""


class CallHost(Host):
    """A function that is called with several completions at once.

    Args:
        name, check: as for every host.
        batch: items that one call gets at most.
        queue: items that may be unfinished at once; more are refused.
    """

    def __init__(self, name: str, batch: int, queue: int, check: Check | None = None) -> None:
        super().__init__(name, check)
        self._batch, self._queue = batch, queue

    async def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores in order. Raises Overloaded when too many items wait already."""
        if self.unfinished + len(items) > self._queue:
            raise Overloaded(
                f"{self.unfinished} answers wait for the reward function {self.name} already",
                field="items",
                value=len(items),
                remedy="try again later, or raise reward.workers",
            )
        self.unfinished += len(items)
        try:
            chunks = [items[i : i + self._batch] for i in range(0, len(items), self._batch)]
            return [score for chunk in await asyncio.gather(*map(self._chunk, chunks)) for score in chunk]
        finally:
            self.unfinished -= len(items)

    async def _chunk(self, items: Sequence[RewardItem]) -> list[Score]:
        try:
            return await self._call(*arguments(items))
        except CallFailed as error:
            if len(items) == 1:
                log.warning("the reward function %s has no score for an answer: %s", self.name, error)
                return [Score(None, error.status)]
        return [score for alone in await asyncio.gather(*(self._chunk([item]) for item in items)) for score in alone]

    @abstractmethod
    async def _call(self, completions: list[list[Message]], columns: dict[str, list[Any]]) -> list[Score]:
        """One call of the function. Raises CallFailed."""


class ThreadHost(CallHost):
    """A function in threads of this process: the caller's own objects, and those that bound themselves.

    Args:
        function: what is called; never twice at once unless it bounds itself.
        timeout_s: seconds until a call is given up; its thread cannot be killed and is left behind. None: no limit.
    """

    def __init__(
        self, function: RewardFunction, timeout_s: float | None, batch: int, queue: int, calls: int, check: Check | None = None
    ) -> None:
        super().__init__(function.name, batch, queue, check)
        self._function, self._timeout_s = function, None if function.bounds_itself else timeout_s
        self._free = asyncio.Semaphore(calls if function.bounds_itself else 1)

    async def _call(self, completions: list[list[Message]], columns: dict[str, list[Any]]) -> list[Score]:
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await in_thread(lambda: self._function.scores(completions, **columns))
            except TimeoutError as error:
                raise CallFailed("timeout", f"no answer within {self._timeout_s} s {error}") from None
            except Exception as error:
                log.debug("the reward function %s failed", self.name, exc_info=True)
                raise CallFailed("error", f"{type(error).__name__}: {error}") from error


class ProcessHost(CallHost):
    """A function in the workers of a pool, which several functions may share.

    Args:
        pool: entered and left by its owner.
        index: of the function in the pool's job.
    """

    def __init__(self, name: str, pool: WorkerPool, index: int, batch: int, queue: int, check: Check | None = None) -> None:
        super().__init__(name, batch, queue, check)
        self._pool, self._index = pool, index

    @property
    def problem(self) -> str | None:
        """Of its pool."""
        return self._pool.problem

    async def _call(self, completions: list[list[Message]], columns: dict[str, list[Any]]) -> list[Score]:
        message = {"function": self._index, "completions": completions, "columns": columns}
        answer = await self._pool.call(json.dumps(message).encode())
        if isinstance(answer, str):
            raise CallFailed(answer, f"its worker: {answer}")
        content = json.loads(answer)
        if "error" in content:
            raise CallFailed("error", content["error"])
        return [Score(**score) for score in content["scores"]]


def arguments(items: Sequence[RewardItem]) -> tuple[list[list[Message]], dict[str, list[Any]]]:
    """Items as a reward function gets them: chats, and a list for every column that any of them has."""
    columns: dict[str, list[Any]] = {
        name: [item.columns.get(name) for item in items] for name in {name for item in items for name in item.columns}
    }
    columns |= {"prompt": [item.prompt for item in items], "ground_truth": [item.ground_truth for item in items]}
    return [[{"role": "assistant", "content": item.response}] for item in items], columns


async def in_thread(function: Callable[[], _T]) -> _T:
    """What a function returns or raises, from a daemon thread of its own: one that never ends holds up nobody's exit."""
    future: Future[_T] = Future()

    def work() -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=work, name="reward-function", daemon=True).start()
    return await asyncio.wrap_future(future)
