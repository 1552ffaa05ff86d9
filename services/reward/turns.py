"""Slots for work, shared fairly by all requests."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Slots for a number of concurrent calls; waiting calls get free slots in turn.

    A batch is all calls of one request. A free slot goes alternately to the batch that has waited
    longest since its last turn and to the newest batch, so that neither a large batch nor many
    small ones delay a later request.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[
            object, deque[asyncio.Future[None]]
        ] = {}  # the batch that has waited longest comes first
        self._newest = False

    @asynccontextmanager
    async def turn(self, batch: object) -> AsyncIterator[None]:
        """Holds a slot, once `batch` has its turn."""
        if self._free:
            self._free -= 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(batch, deque()).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():  # it already has its slot
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Gives a slot to the next waiting call."""
        while self._waiting:
            batch = next(reversed(self._waiting) if self._newest else iter(self._waiting))
            waiters = self._waiting.pop(batch)
            while waiters and waiters[0].done():  # cancelled
                waiters.popleft()
            if not waiters:
                continue
            waiters.popleft().set_result(None)
            if waiters:
                self._waiting[batch] = waiters
            self._newest = not self._newest
            return
        self._free += 1
