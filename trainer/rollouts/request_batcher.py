"""Calls that several tasks make within a moment, made as one."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from common import logs
from common.clients import Unreachable

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")
_Waiting = tuple[_T, "asyncio.Future[_R]", contextvars.Context]
_MOMENT_S = 0.003
"""What it costs one call to wait for others; an HTTP call takes its two ends about 2 ms of processor time."""


class RequestBatcher(Generic[_T, _R]):
    """Callable like `call` with one item; items that come within 3 ms of the first go along in its call.

    Calls do not wait for each other. When a call of several is refused, each item is tried alone, so that an error is of those
    who caused it. A service that did not answer until the deadline is not asked again: that is an error of all. A call with one
    item has the request id of who wants it; one with several has its own, and a line at DEBUG says for whom it is.

    Args:
        call: takes items, returns their results in order.
        size: of an item.
        most: sum of the sizes in one call; a larger item goes alone.
    """

    def __init__(
        self, call: Callable[[list[_T]], Awaitable[Sequence[_R]]], most: int, size: Callable[[_T], int] = lambda _: 1
    ) -> None:
        self._call, self._most, self._size = call, most, size
        self._waiting: list[_Waiting[_T, _R]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, item: _T) -> _R:
        future: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        if self._waiting and sum(self._size(other) for other, *_ in self._waiting) + self._size(item) > self._most:
            self._send()
        self._waiting.append((item, future, contextvars.copy_context()))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(_MOMENT_S, self._send_with, future)
        return await future

    def _send_with(self, first: "asyncio.Future[_R]") -> None:
        if self._waiting and self._waiting[0][1] is first:  # else it has gone, because there were too many
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1:
            self._start(waiting)
            return
        with logs.request(logs.new_request_id()):
            log.debug("one call for %s", ", ".join(context.run(logs.request_id) for _, _, context in waiting))
            self._start(waiting, contextvars.copy_context())

    def _start(self, waiting: "list[_Waiting[_T, _R]]", context: contextvars.Context | None = None) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._settle(waiting), context=waiting[0][2] if context is None else context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _settle(self, waiting: "list[_Waiting[_T, _R]]") -> None:
        try:
            results = await self._call([item for item, *_ in waiting])
            for (_, future, _), result in zip(waiting, results, strict=True):
                if not future.done():  # who asked may have been cancelled
                    future.set_result(result)
        except Exception as error:
            if len(waiting) > 1 and not isinstance(error, Unreachable):
                await asyncio.gather(*(self._start([one]) for one in waiting))
                return
            for _, future, _ in waiting:
                if not future.done():
                    future.set_exception(error)
