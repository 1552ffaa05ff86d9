"""Clocks that tests move."""

import asyncio


class Clock:
    """Stands for the module `time` where only `monotonic` is used."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def leap(seconds: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Moves the clock of an event loop forward, the running one's if none is given. Its limits of
    minutes can then be reached at once, on a machine however slow.
    """
    loop = loop or asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
