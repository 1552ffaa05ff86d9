"""The clock of an episode, which stands still while the episode waits for others: for answers of
the model, whose engines may be busy, and for a thread.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self


class EpisodeClock:
    """Limits an episode's own time.

    async with clock.limit(600):      # TimeoutError after 600 s
        with clock.stopped():         # which do not count in here
            await answer()
    """

    def __init__(self) -> None:
        self._stops = 0
        self._left: dict[asyncio.Timeout, float | None] = {}
        """The limits, and the seconds left to each when the clock was stopped."""

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[None]:
        """Limits the block to `seconds` of this clock. Raises TimeoutError."""
        async with asyncio.timeout(seconds) as limit:
            self._left[limit] = seconds
            if self._stops:
                limit.reschedule(None)
            try:
                yield
            finally:
                del self._left[limit]

    def stopped(self) -> Self:
        """Stops the clock inside the `with` block; several blocks may overlap."""
        return self

    def __enter__(self) -> None:
        self._stops += 1
        if self._stops > 1:
            return
        now = asyncio.get_running_loop().time()
        for limit in self._left:
            until = limit.when()
            if until is not None and not limit.expired():
                self._left[limit] = until - now
                limit.reschedule(None)

    def __exit__(self, *_: object) -> None:
        self._stops -= 1
        if self._stops:
            return
        now = asyncio.get_running_loop().time()
        for limit, left in self._left.items():
            if left is not None and not limit.expired():
                limit.reschedule(now + left)
