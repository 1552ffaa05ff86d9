"""Holds a group back until the engines have room for it: while it waits here, no clock runs and
every engine can still get it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.clients.engines import Engines

_FIRST_LOOK_S = 0.01
"""Time between the first two looks of a group that waits, which doubles with every look."""
_LOOK_S = 0.1
"""Longest such time, unless looks themselves take long."""
_LOOK_SHARE = 0.2
"""Most of the time that looks may take: there may be many engines."""
_OLD_S = 5.0
"""A look counts for nothing once the next one has been due for this long."""
_TRANSIT_S = 0.5
"""Seconds that a group may take to get into an engine, which does not count it until then."""


class EngineRoom:
    """What the engines of a run can take."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._turn = asyncio.Lock()
        self._room = 0.0
        """Completions that may still be sent, by the last look and what has ended since."""
        self._sent: dict[object, tuple[float, int]] = {}
        """When completions were sent that have no answer yet, and how many; of late."""
        self._looked_at = 0.0
        self._next_look = 0.0
        self._pause_s = _FIRST_LOOK_S

    @asynccontextmanager
    async def enter(self, completions: int) -> AsyncIterator[None]:
        """Waits, first come, first served, until the engines have room for some of these
        completions, which are generated inside the block. Does not wait for engines that do not
        report their load.
        """
        sent = object()
        loop = asyncio.get_running_loop()
        async with self._turn:
            # There may be other engines by now, or they say what they do.
            if loop.time() >= self._next_look + _OLD_S:
                self._room = 0.0
            self._pause_s = _FIRST_LOOK_S
            while self._room <= 0:
                await asyncio.sleep(max(0.0, self._next_look - loop.time()))
                await self._look()
            self._room -= completions
            sent_at = loop.time()
            self._sent[sent] = (sent_at, completions)
        try:
            yield
        finally:
            self._sent.pop(sent, None)
            # If their answer was on its way during the last look, it no longer counted them, and
            # their room would be given away twice.
            may_be_seen = sent_at < self._looked_at and loop.time() < self._looked_at + _TRANSIT_S
            if not may_be_seen:
                self._room += completions

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        room = await self._engines.room()
        self._sent = {
            sent: (at, completions)
            for sent, (at, completions) in self._sent.items()
            if at >= began - _TRANSIT_S
        }
        self._room = room - sum(completions for _, completions in self._sent.values())
        self._looked_at = loop.time()
        took_s = self._looked_at - began
        self._next_look = self._looked_at + max(self._pause_s, took_s / _LOOK_SHARE)
        self._pause_s = min(2 * self._pause_s, _LOOK_S)
