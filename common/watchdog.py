"""Shows where a process is: what it awaits from whom and for how long, and the stacks of all its threads and tasks.

That goes to the log when a long deadline passes, when nothing has happened in the training loop for a while, and when a person
asks with SIGUSR1. SIGQUIT writes the threads alone, straight to standard error, even where the interpreter cannot run.
"""

import asyncio
import faulthandler
import itertools
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

log = logging.getLogger(__name__)
STALL_S = 600.0
"""Without a step forward in the training loop until every rank logs where it is."""
LONG_S = 60.0
"""A deadline that is worth stacks when it passes."""
_QUIET_S = 60.0
"""Between two reports of deadlines: hundreds may pass in the same moment."""
_TICK_S = 0.5
_SHOWN = 40
"""Different stacks of tasks in a report."""


@dataclass(frozen=True)
class _Wait:
    what: str
    whom: str
    since: float = field(default_factory=time.monotonic)


@dataclass
class _Stage:
    """Where the training loop is."""

    limit_s: float
    text: str = "starting"
    since: float = field(default_factory=time.monotonic)
    reports: int = 0


_waits: dict[int, _Wait] = {}
_numbers = itertools.count()
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
_stage: _Stage | None = None
_last_deadline = -_QUIET_S
_asked: tuple[int, int] | None = None
"""A pipe that wakes the thread."""


@contextmanager
def waiting(what: str, whom: str) -> Iterator[None]:
    """Inside, a report says that `what` is awaited from `whom`, and since when."""
    number = next(_numbers)
    _waits[number] = _Wait(what, whom)
    try:
        yield
    finally:
        del _waits[number]


def follow(loop: asyncio.AbstractEventLoop) -> None:
    """A report shows the tasks of this loop from now on."""
    _loops.add(loop)


def deadline_passed(reason: str) -> None:
    """A report, once a minute at most: a wait that was long enough to matter has failed."""
    global _last_deadline
    now = time.monotonic()
    if now - _last_deadline >= _QUIET_S:
        _last_deadline = now
        log.error("%s\n%s", reason, report())


@contextmanager
def stalls(limit_s: float = STALL_S) -> Iterator[None]:
    """Inside, `at` is called whenever something happens; a silence of `limit_s` seconds, and of every double, is reported."""
    global _stage
    _stage = _Stage(limit_s)
    try:
        yield
    finally:
        _stage = None


def at(text: str) -> None:
    """Something has happened; what follows is named `text`."""
    global _stage
    if _stage is not None:
        _stage = _Stage(_stage.limit_s, text)


def place() -> tuple[str, float] | None:
    """What the training loop is at, and for how many seconds; None outside one."""
    stage = _stage
    return None if stage is None else (stage.text, time.monotonic() - stage.since)


def start() -> None:
    """Listens to SIGUSR1 and SIGQUIT and looks for stalls, in a thread of its own. Calling it again changes nothing."""
    global _asked
    if _asked is not None:
        return
    _asked = os.pipe()
    for end in _asked:
        os.set_blocking(end, False)
    # A handler of Python's would run in the main thread alone, which may be in a collective for hours. This one is C, and what
    # it writes into the pipe only wakes the thread: that can say more.
    faulthandler.register(signal.SIGUSR1, _asked[1], all_threads=True)
    faulthandler.register(signal.SIGQUIT, sys.__stderr__ or 2, all_threads=True)
    threading.Thread(target=_watch, args=(_asked[0],), name="watchdog", daemon=True).start()


def awaited() -> list[str]:
    """What is awaited from whom and since when, a line for each kind of call, the longest first."""
    return list(_awaited())


def report() -> str:
    """What is awaited, and the stacks of all threads and tasks of this process."""
    return "\n".join([*(f"awaited: {call}" for call in _awaited()), *_threads(), *_tasks()])


def stacks() -> str:
    """Where every thread of this process is, the last call at the end."""
    return "\n".join(_threads())


def _watch(asked: int) -> None:
    while True:
        if select.select([asked], [], [], _TICK_S)[0]:
            time.sleep(0.1)  # until the handler is through
            while select.select([asked], [], [], 0)[0]:
                os.read(asked, 65536)
            log.warning("where this process is (SIGUSR1):\n%s", report())
        if (stage := _stage) is not None:
            silent_s = time.monotonic() - stage.since
            if silent_s >= stage.limit_s * 2**stage.reports:
                stage.reports += 1
                log.error("nothing has happened for %.0f s; this process is at: %s\n%s", silent_s, stage.text, report())


def _awaited() -> Iterator[str]:
    now, longest, count = time.monotonic(), dict[tuple[str, str], float](), Counter[tuple[str, str]]()
    for wait in list(_waits.values()):
        call = (wait.what, wait.whom)
        longest[call] = max(longest.get(call, 0.0), now - wait.since)
        count[call] += 1
    for (what, whom), seconds in sorted(longest.items(), key=lambda item: -item[1]):
        several = f", {count[what, whom]} times" if count[what, whom] > 1 else ""
        yield f"{what} from {whom} since {seconds:.0f} s{several}"


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            yield f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip()


def _tasks() -> Iterator[str]:
    counted = Counter(_task_stack(task) for loop in list(_loops) if not loop.is_closed() for task in asyncio.all_tasks(loop))
    for text, count in counted.most_common(_SHOWN):
        yield f"{count} task{'s' if count > 1 else ''} at:\n{text}"
    if len(counted) > _SHOWN:
        yield f"and tasks at {len(counted) - _SHOWN} other places"


def _task_stack(task: "asyncio.Task[Any]") -> str:
    """Every coroutine from the task's own to what it awaits: `Task.get_stack` shows only the first."""
    lines, awaited = list[str](), cast(Any, task.get_coro())
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(awaited, f"{kind}_frame", None)) is not None:
                code = frame.f_code
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
                awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
                break
        else:
            lines.append(f"  awaits a {type(awaited).__name__}")
            break
    return "\n".join(lines)
