"""Slots for work, shared fairly by all requests."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Slots for a number of concurrent calls; waiting calls get the free ones in a fair order.

    A batch is all calls of one request. A free slot goes alternately to the batch that has waited
    longest since its last slot and to the newest batch, so that neither a large batch nor many
    small ones delay a later request.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        # The waiting calls of every batch; the batch that has waited longest comes first.
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}
        self._newest_next = False

    @asynccontextmanager
    async def slot(self, batch: object) -> AsyncIterator[None]:
        """Holds a slot, once a call of `batch` gets one."""
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
            batches = reversed(self._waiting) if self._newest_next else iter(self._waiting)
            batch = next(batches)
            waiters = self._waiting.pop(batch)
            while waiters and waiters[0].done():  # cancelled
                waiters.popleft()
            if not waiters:
                continue
            waiters.popleft().set_result(None)
            if waiters:
                self._waiting[batch] = waiters
            self._newest_next = not self._newest_next
            return
        self._free += 1
