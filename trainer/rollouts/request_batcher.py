"""Batches the calls that several tasks make at nearly the same time."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from common.clients.base import Unreachable
from common.errors import ServiceLost
from common.process import logs

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")
_Waiting = tuple[_T, "asyncio.Future[_R]", contextvars.Context]
_WAIT_S = 0.003
"""How long to wait for more items; an HTTP call costs client and server about 2 ms of processor
time."""
_BUSY_WAIT_S = 0.02
"""The same while another call is not answered: at its end at the latest the items go."""


class RequestBatcher(Generic[_T, _R]):
    """Is called like `call`, but with one item, and combines items that arrive together into one
    call: those that arrive within 3 ms of the first or, for up to 20 ms, until the previous call is
    answered.

    Calls do not wait for a slow one. When a call with several items fails, each item is tried
    alone, so that only the faulty items fail. A service that did not answer by the deadline, or is
    lost, is not called again: all items fail. A call with one item keeps that item's request id;
    one with several gets a new id, and a DEBUG line lists the ids of its items.

    For example, `store = RequestBatcher(call, max_size=3)` while `call` takes 10 ms:

        ms    what happens                     calls that begin
        0     store(a) waits
        1     store(b) waits
        3     3 ms have passed since a         call([a, b])
        4     store(c) waits for its end
        13    call([a, b]) is answered         call([c])
        14    store(d), store(e), store(f)
        15    store(g) does not fit beside     call([d, e, f])
        23    call([c]) is answered
        25    call([d, e, f]) is answered      call([g])

    Args:
        call: takes items, returns their results in order.
        max_size: limit on the total size of the items in one call; a larger item is sent alone.
        size: returns the size of an item.
        may_follow: whether further items may come soon. Without any, nobody waits for them, nor
            for the call before.
    """

    _timer: asyncio.TimerHandle

    def __init__(
        self,
        call: Callable[[list[_T]], Awaitable[Sequence[_R]]],
        max_size: int,
        size: Callable[[_T], int] = lambda _: 1,
        may_follow: Callable[[], bool] = lambda: True,
    ) -> None:
        self._call = call
        self._max_size = max_size
        self._size = size
        self._may_follow = may_follow
        self._waiting: list[_Waiting[_T, _R]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, item: _T) -> _R:
        future: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        size = sum(self._size(other) for other, *_ in self._waiting)
        # It does not fit beside those that wait: they go now.
        if self._waiting and size + self._size(item) > self._max_size:
            self._send()
        self._waiting.append((item, future, contextvars.copy_context()))
        if len(self._waiting) == 1:
            wait_s = _BUSY_WAIT_S if self._tasks else _WAIT_S
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send)
        if not self._may_follow():
            self._send()
        return await future

    def _send(self) -> None:
        self._timer.cancel()
        waiting = self._waiting
        self._waiting = []
        if len(waiting) == 1:
            self._start(waiting)
            return
        with logs.request(logs.new_request_id()):
            ids = [context.run(logs.request_id) for _, _, context in waiting]
            log.debug("one call for %s", ", ".join(ids))
            self._start(waiting, contextvars.copy_context())

    def _start(
        self, waiting: "list[_Waiting[_T, _R]]", context: contextvars.Context | None = None
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(
            self._run(waiting), context=waiting[0][2] if context is None else context
        )
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if self._waiting and not self._tasks:
            self._send()

    async def _run(self, waiting: "list[_Waiting[_T, _R]]") -> None:
        try:
            results = await self._call([item for item, *_ in waiting])
            for (_, future, _), result in zip(waiting, results, strict=True):
                if not future.done():  # the caller may have been cancelled
                    future.set_result(result)
        except BaseException as error:
            goes_on = isinstance(error, Exception)
            service_answers = goes_on and not isinstance(error, Unreachable | ServiceLost)
            # One faulty item fails the whole call; tried alone, the others succeed.
            if service_answers and len(waiting) > 1:
                await asyncio.gather(*(self._start([one]) for one in waiting))
                return
            for _, future, _ in waiting:
                if not future.done():
                    future.set_exception(error)
            if not goes_on:
                raise
