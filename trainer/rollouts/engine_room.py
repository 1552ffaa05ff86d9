"""The turn of a group: it is sent when the engines have room for it, and until then waits here,
where no clock runs and where every engine can still get it.
"""

import asyncio
import math
from collections import deque

from common.clients.engines import Engines

_LOOK_S = 0.1
"""Shortest time between two looks at the engines."""
_LOOK_SHARE = 0.2
"""Most of the time that looks may take: there may be many engines."""
_TRANSIT_S = 0.5
"""A group may take so long to get into an engine, which does not count it until then."""


class EngineRoom:
    """What the engines of a run can take."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._turn = asyncio.Lock()
        self._room = 0.0
        """Completions that may still be sent, as of the last look."""
        self._sent: deque[tuple[float, int]] = deque()
        """When completions were sent of late, and how many."""
        self._next_look = 0.0

    async def enter(self, completions: int) -> None:
        """Waits until the engines have room for some of these completions; the calls come in in
        their order. Does not wait for engines that do not say what they do.
        """
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._room == math.inf and loop.time() >= self._next_look:
                self._room = 0.0  # they may say it by now
            while self._room <= 0:
                await asyncio.sleep(max(0.0, self._next_look - loop.time()))
                await self._look()
            self._room -= completions
            self._sent.append((loop.time(), completions))

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        room = await self._engines.room()
        while self._sent and self._sent[0][0] < began - _TRANSIT_S:
            self._sent.popleft()
        self._room = room - sum(completions for _, completions in self._sent)
        took_s = loop.time() - began
        self._next_look = loop.time() + max(_LOOK_S, took_s / _LOOK_SHARE)
