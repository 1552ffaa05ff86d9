"""Runs the buffer in one thread, and lets requests wait for groups without blocking that thread."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from common.process import logs
from common.wire.schemas import Group, TakeRequest
from services.http.one_thread import OneThread
from services.replay.buffer import ReplayBuffer
from services.replay.store import Lease

_T = TypeVar("_T")
_A = TypeVar("_A")


class Worker(OneThread):
    """Runs the buffer's calls one after the other in a thread, so that disk syncs do not block the
    event loop.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        super().__init__("replay")
        self.buffer = buffer
        self._arrivals = 0
        self._arrived = asyncio.Condition()

    async def call_of_run(self, function: Callable[[_A], _T], argument: _A) -> _T:
        """Runs `function(argument)` in the thread unless another run than the caller's is the
        current one by then.

        Checked there, since another run may begin while a request sends its body or waits.
        """

        def checked() -> _T:
            self.buffer.runs.check_current(logs.run_id())
            return function(argument)

        return await self.call(checked)

    async def add(self, groups: list[Group]) -> dict[str, int]:
        """Calls `ReplayBuffer.add`, then wakes the waiting `take` calls."""
        added = await self.call_of_run(self.buffer.add, groups)
        async with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()
        return added

    async def take(self, request: TakeRequest) -> Lease:
        """Calls `ReplayBuffer.take`, waiting up to `wait_s` seconds; the lease is empty if fewer
        than `count` came.

        Nothing is leased while it waits, so a cancelled take holds no group.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_s
        while True:
            seen = self._arrivals
            left = deadline - loop.time()
            taken, expiry = await self.call_of_run(partial(self._take, ends=left <= 0), request)
            if taken is not None:
                return taken
            wait_s = left if expiry is None else min(left, expiry + 0.001)
            await self._arrival(seen, request.count, wait_s)

    def _take(self, request: TakeRequest, *, ends: bool) -> tuple[Lease | None, float | None]:
        """Takes in the thread; returns also the seconds until a lease ends, after which it may
        succeed.
        """
        taken = self.buffer.take(request, ends=ends)
        return taken, self.buffer.next_expiry_s() if taken is None else None

    async def _arrival(self, seen: int, count: int, timeout_s: float) -> None:
        """Waits until groups have arrived since `seen` was read and `count` are fresh, at most
        `timeout_s` seconds.
        """
        store = self.buffer.store
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(
                    lambda: self._arrivals != seen and store.committed["fresh"][0] >= count
                )

    async def close(self) -> None:
        """Closes the buffer and stops the thread."""
        await self.call(self.buffer.close)
        await super().close()
