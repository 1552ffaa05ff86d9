"""Waits that are bounded by progress, not by a constant.

How long weights, a model or a checkpoint take depends on their size, which no constant knows. Such
a wait may last as long as a number grows (bytes, tensors, nodes), and ends when it has not grown
for a stated time.

    waits = Progress("weights 3", 600.0, unit="bytes", field="limits.fence_after_s")
    while not done():
        waits.saw(bytes_so_far())
        waits.check()

Every growth also counts in the process's `total`, which other processes see: in `/health`, in an
agent's reports and in a rank's beats. So a process that waits for one that works does not look
stuck itself.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from common.errors import ServiceError
from common.process.futures import forgettable
from common.process.work_meter import WorkMeter

_T = TypeVar("_T")
# Fewest looks without growth after which a wait counts as stuck.
_LOOKS = 4
_WORK_S = 1.0
_lock = threading.Lock()
_total = 0
_others = 0


class Stuck(ServiceError):
    """What was waited for has made no progress for too long."""

    status = 504
    code = "stuck"


def moved() -> None:
    """Counts a bit of progress of this process."""
    global _total
    with _lock:
        _total += 1


def others_moved() -> None:
    """Counts a bit of progress of the services that this process waits for.

    The count is apart from the process's own. Otherwise a service in this same process would report
    it as its own progress, to a client that waits for that service.
    """
    global _others
    with _lock:
        _others += 1


def total(*, with_others: bool = False) -> int:
    """Returns a number that grows as long as this process makes progress, or, `with_others`, the
    services that it waits for.
    """
    return _total + _others if with_others else _total


def of_others() -> int:
    """Returns a number that grows as long as the services that this process waits for make
    progress.
    """
    return _others


class Progress:
    """A wait for `what` that is stuck when its number has not grown for `limit_s` seconds.

    Growth is growth over the highest number so far: what is done again after a failure is no
    progress. A look that comes late counts as a quarter of the limit at most, because this process
    itself may have been stopped. `field` names the setting of the limit. Unless `counts`, growth is
    not added to the process's total. One thread at a time.
    """

    def __init__(
        self,
        what: str,
        limit_s: float,
        *,
        unit: str = "",
        field: str | None = None,
        remedy: str | None = None,
        counts: bool = True,
    ) -> None:
        self.what = what
        self.limit_s = limit_s
        self._unit = unit
        self._field = field
        self._remedy = remedy
        self._counts = counts
        self._began = time.monotonic()
        self._looked = self._began
        self.silent_s = 0.0
        """Seconds since the number last grew, as far as anybody looked."""
        self._highest = 0.0
        self._seen = ""

    @property
    def pause_s(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.limit_s / (2 * _LOOKS))

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    @property
    def is_stuck(self) -> bool:
        """Whether the last look found no progress for `limit_s` seconds."""
        return self.silent_s >= self.limit_s

    def saw(self, number: float, text: str = "") -> bool:
        """Records the number at this moment; returns whether it grew. `text` says how far it is."""
        now = time.monotonic()
        self.silent_s += min(now - self._looked, self.limit_s / _LOOKS)
        self._looked = now
        self._seen = text
        if number <= self._highest:
            return False
        self._highest = number
        self.silent_s = 0.0
        if self._counts:
            moved()
        return True

    def __str__(self) -> str:
        """Says how far the wait is and when that last changed."""
        seen = self._seen or f"{self._highest:,.0f} {self._unit}".strip()
        return (
            f"{self.what} after {self.waited_s:.3g} s: {seen}, unchanged for {self.silent_s:.3g} s"
        )

    def check(self) -> None:
        """Raises Stuck when there was no progress for `limit_s` seconds."""
        if self.is_stuck:
            raise self.error()

    def error(self) -> Stuck:
        """Returns the error that says what was waited for, how far it got, and when it last
        moved.
        """
        return Stuck(
            f"no progress for {self.silent_s:.3g} s of waiting for {self}",
            field=self._field,
            value=self.limit_s,
            remedy=self._remedy,
        )


async def bounded(work: Awaitable[_T], waits: Progress, number: Callable[[], float]) -> _T:
    """Returns or raises what `work` does. Cancels it and raises Stuck when `number` does not grow
    any more.
    """
    task = forgettable(asyncio.ensure_future(work))
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=waits.pause_s)
            if done:
                return task.result()
            waits.saw(number())
            waits.check()
    finally:
        task.cancel()


@contextmanager
def working() -> Iterator[None]:
    """Counts as progress what this process and its children read, write and take as memory while
    inside.

    For libraries that load or save in one call.
    """
    ended = threading.Event()
    meter = WorkMeter(os.getpid())

    def watch() -> None:
        before = meter.read()
        while not ended.wait(_WORK_S):
            now = meter.read()
            if now > before:
                moved()
            before = now

    moved()
    threading.Thread(target=watch, name="progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        moved()
