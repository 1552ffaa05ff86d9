"""Reports what a process is doing: its pending calls to other services, and the stacks of its
threads and asyncio tasks.

Reports go to the log when a long wait is given up, when the training loop stalls, and on SIGUSR1.
SIGQUIT writes only the thread stacks, directly to standard error, even when the interpreter cannot
run. So do, after `STUCK_S` seconds, the stacks of a process in which no Python can run
(`interpreter_guarded`).
"""

import asyncio
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

from pydantic import BaseModel

from common import VERSION
from common.process import progress

log = logging.getLogger(__name__)
STALL_S = 600.0
"""Seconds without progress in the training loop after which every rank writes a report."""
LONG_S = 60.0
"""Deadlines of at least this many seconds write a report when they pass."""
# Hundreds of deadlines may pass at once; one report per minute is enough.
_REPORT_INTERVAL_S = 60.0
STUCK_S = 30.0
"""Seconds in which a single call keeps the interpreter's lock, after which stacks are written."""
_GUARD_TICK_S = 5.0
_TICK_S = 0.5
_MAX_TASK_STACKS = 40


def _moves() -> int:
    return progress.total(with_others=True)


class Awaited(BaseModel):
    """Pending calls of one kind."""

    call: str
    service: str
    seconds: float
    """Age of the oldest."""
    count: int


class Where(BaseModel):
    """What a process is doing; the answer of `GET /where`."""

    place: str = ""
    """What the training loop is doing; empty outside of one."""
    since_s: float = 0.0
    awaited: list[Awaited] = []
    """The calls to other services that are pending, the longest first."""
    stacks: str = ""
    """The stacks of all threads and tasks."""
    pid: int = 0
    time: float = 0.0
    """The clock of this process, in seconds since 1970."""
    version: str = ""


class RankWhere(Where):
    """What a rank of the trainer is doing; an element of the answer of `GET /ranks`."""

    rank: int
    name: str
    """The rank and its node. A rank that did not answer has the `pid` 0."""


@dataclass
class _Stage:
    """The current activity of the training loop."""

    limit_s: float
    text: str = "starting"
    since: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)
    moves: int = field(default_factory=_moves)
    reports: int = 0


# Pending calls: the call, its service, and its start.
_waits: dict[object, tuple[str, str, float]] = {}
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
_stage: _Stage | None = None
_last_deadline = -_REPORT_INTERVAL_S
# The pipe that wakes the watchdog thread.
_wakeup: tuple[int, int] | None = None
# Asks the other ranks of the trainer; set on rank 0 only.
_other_ranks: Callable[[], list[RankWhere]] = list
_after_report: Callable[[str], None] | None = None


class waiting:
    """Lists `call` to `service` as pending while inside."""

    def __init__(self, call: str, service: str) -> None:
        self._wait = call, service, time.monotonic()

    def __enter__(self) -> None:
        _waits[self] = self._wait

    def __exit__(self, *_: object) -> None:
        del _waits[self]


def follow(loop: asyncio.AbstractEventLoop) -> None:
    """Includes the tasks of this loop in all later reports."""
    _loops.add(loop)


def deadline_passed(reason: str) -> None:
    """Logs `reason` with a report, at most once a minute."""
    global _last_deadline
    now = time.monotonic()
    if now - _last_deadline >= _REPORT_INTERVAL_S:
        _last_deadline = now
        log.error("%s\n%s", reason, report())
        _reported(reason)


@contextmanager
def stalls(limit_s: float = STALL_S) -> Iterator[None]:
    """Inside this context, reports when this process makes no progress for `limit_s` seconds
    (`common.process.progress`), and again after every doubling.
    """
    global _stage
    _stage = _Stage(limit_s)
    try:
        yield
    finally:
        _stage = None


def at(text: str) -> None:
    """Records progress: the training loop now begins `text`."""
    global _stage
    progress.moved()
    if _stage is not None:
        _stage = _Stage(_stage.limit_s, text)


def place() -> tuple[str, float] | None:
    """Returns what the training loop is doing and for how many seconds; None outside a training
    loop.
    """
    stage = _stage
    return None if stage is None else (stage.text, time.monotonic() - stage.since)


def start() -> None:
    """Starts the thread that handles SIGUSR1 and SIGQUIT and looks for stalls. Further calls do
    nothing.

    A SIGUSR1 is lost when the kernel gives it to a thread that runs no Python, which happens while
    such a thread starts: send it again.
    """
    global _wakeup
    if _wakeup is not None:
        return
    _wakeup = os.pipe()
    for end in _wakeup:
        os.set_blocking(end, False)
    # A Python signal handler runs only in the main thread, which may be in a collective for hours.
    # This C handler writes to the pipe, which wakes the reporting thread. It walks only its own
    # stack: other stacks change meanwhile.
    faulthandler.register(signal.SIGUSR1, _wakeup[1], all_threads=False)
    faulthandler.register(signal.SIGQUIT, sys.__stderr__ or 2, all_threads=True)
    threading.Thread(target=_watch, args=(_wakeup[0],), name="watchdog", daemon=True).start()


@contextmanager
def interpreter_guarded(stuck_s: float = STUCK_S) -> Iterator[None]:
    """Inside this context, writes the stacks of all threads to standard error when one of them
    keeps the interpreter's lock for `stuck_s` seconds, as a regular expression of a reward function
    may: then no thread, log or timeout of this process works.

    A thread postpones a timer of the C library again and again, which it cannot when it is stuck.
    """
    output = sys.__stderr__
    if output is None:
        yield
        return
    ended = threading.Event()
    tick_s = min(_GUARD_TICK_S, stuck_s / 4)

    def postpone() -> None:
        while not ended.is_set():
            faulthandler.dump_traceback_later(stuck_s, file=output)
            ended.wait(tick_s)

    # Set here: a call that is stuck at once keeps the thread from its first line.
    faulthandler.dump_traceback_later(stuck_s, file=output)
    thread = threading.Thread(target=postpone, name="interpreter-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def ask_other_ranks_with(ask: Callable[[], list[RankWhere]] | None) -> None:
    """Sets the function that asks the trainer's other ranks where they are; None removes it."""
    global _other_ranks
    _other_ranks = ask or list


def after_report(write: Callable[[str], None] | None) -> None:
    """Sets the function that is called, with the reason, after every report of a stall or of a
    passed deadline; None removes it.
    """
    global _after_report
    _after_report = write


def where() -> Where:
    """Returns what this process is doing."""
    text, since_s = place() or ("", 0.0)
    return Where(
        place=text,
        since_s=since_s,
        awaited=pending(),
        stacks=_stacks(),
        pid=os.getpid(),
        time=time.time(),
        version=VERSION,
    )


def other_ranks() -> list[RankWhere]:
    """Returns what the trainer's other ranks are doing; takes some seconds if one does not answer.
    Empty where this is not rank 0 of several.
    """
    return _other_ranks()


def pending() -> list[Awaited]:
    """Returns the pending calls, the longest first."""
    now = time.monotonic()
    ages = dict[tuple[str, str], list[float]]()
    for call, service, since in list(_waits.values()):
        ages.setdefault((call, service), []).append(now - since)

    longest_first = sorted(ages.items(), key=lambda item: -max(item[1]))
    return [
        Awaited(call=call, service=service, seconds=max(seconds), count=len(seconds))
        for (call, service), seconds in longest_first
    ]


def awaited() -> list[str]:
    """Returns the pending calls, one line per kind, the longest first."""
    lines = list[str]()
    for each in pending():
        times = f", {each.count} times" if each.count > 1 else ""
        lines.append(f"{each.call} from {each.service} for {each.seconds:.0f} s{times}")
    return lines


def report() -> str:
    """Returns the pending calls and the stacks of all threads and tasks of this process."""
    return "\n".join([*(f"awaited: {call}" for call in awaited()), _stacks()])


def _stacks() -> str:
    return "\n".join([stacks(), *_tasks()])


def _reported(reason: str) -> None:
    write = _after_report
    if write is not None:
        # In a thread, since it may ask services: the caller has a deadline that has passed.
        threading.Thread(target=write, args=(reason,), name="diagnosis", daemon=True).start()


def stacks() -> str:
    """Returns the stack of every other thread of this process, the main one first, the innermost
    call last.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = list[str]()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame)).rstrip()
            texts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(texts)


def _watch(wakeup: int) -> None:
    while True:
        if select.select([wakeup], [], [], _TICK_S)[0]:
            time.sleep(0.1)  # until the handler has finished
            while select.select([wakeup], [], [], 0)[0]:
                os.read(wakeup, 65536)
            log.warning("where this process is (SIGUSR1):\n%s", report())
        stage = _stage
        if stage is not None:
            if _moves() != stage.moves:
                stage.moves = _moves()
                stage.moved_at = time.monotonic()
                stage.reports = 0
            silent_s = time.monotonic() - stage.moved_at
            if silent_s >= stage.limit_s * 2**stage.reports:
                stage.reports += 1
                log.error(
                    "nothing has happened for %.0f s; this process is at: %s\n%s",
                    silent_s,
                    stage.text,
                    report(),
                )
                _reported(f"nothing has happened for {silent_s:.0f} s: {stage.text}")


def _tasks() -> Iterator[str]:
    counted = Counter[str]()
    for loop in list(_loops):
        if not loop.is_closed():
            counted.update(map(_task_stack, asyncio.all_tasks(loop)))
    for text, count in counted.most_common(_MAX_TASK_STACKS):
        yield f"{count} task{'s' if count > 1 else ''} at:\n{text}"
    if len(counted) > _MAX_TASK_STACKS:
        yield f"and tasks at {len(counted) - _MAX_TASK_STACKS} other places"


def _task_stack(task: "asyncio.Task[Any]") -> str:
    """Returns every coroutine from the task's own to the innermost; `Task.get_stack` shows only the
    first.
    """
    lines = list[str]()
    awaited = cast(Any, task.get_coro())
    while awaited is not None:
        frame = None
        for kind in ("cr", "gi", "ag"):  # a coroutine, a generator, an asynchronous generator
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                break
        if frame is None:
            lines.append(f"  awaits a {type(awaited).__name__}")
            break

        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return "\n".join(lines)
