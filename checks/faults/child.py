"""Runs one fault in a process of its own, and reads what it says, each line with its time."""

import contextlib
import os
import re
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.faults.judge import Line

_READ = 65536
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GRACE_S = 15.0
"""For the end of the run, whose stores are looked at."""


@dataclass
class _Deadline:
    """When a process is killed."""

    at: float
    """Seconds of the monotonic clock."""


@dataclass(frozen=True)
class Outcome:
    """What a process said, and how it ended."""

    lines: list[Line]
    began: float
    """Seconds of the monotonic clock."""
    seconds: float
    status: int | None
    """The exit status, negative for a signal; None when it was killed at the limit."""


def run_child(
    work: Callable[[], int], output: Path, limit_s: float, is_enough: Callable[[str], bool]
) -> Outcome:
    """Forks a process that does `work`; returns its output, which `output` gets too.

    It is killed, with everything that it started, after `limit_s` seconds, or `_GRACE_S` seconds
    after a line that `is_enough`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        status = 1
        try:
            status = work()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writing)

    deadline = _Deadline(began + limit_s)
    lines: list[Line] = []
    with output.open("w", encoding="utf-8") as log:
        for line in _lines(reading, deadline, pid):
            if is_enough(line.text):
                deadline.at = min(deadline.at, line.at + _GRACE_S)
            lines.append(line)
            log.write(f"{line.at - began:8.2f} {line.text}\n")
    os.close(reading)
    ended = _status(pid, deadline.at)
    _kill(pid)
    if ended is None:
        os.waitpid(pid, 0)
    return Outcome(lines, began, time.monotonic() - began, ended)


def _status(pid: int, until: float) -> int | None:
    """Returns the exit status; None if the process still runs at that time."""
    while True:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def _lines(reading: int, deadline: _Deadline, pid: int) -> Iterator[Line]:
    """Yields the lines until the process has ended or the time has passed."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while time.monotonic() < deadline.at:
            if not selector.select(0.05):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    break
                continue
            content = os.read(reading, _READ)
            if not content:
                break
            now = time.monotonic()
            *whole, rest = (rest + content).split(b"\n")
            for line in whole:
                yield Line(now, _text(line))
    if rest:
        yield Line(time.monotonic(), _text(rest))


def _text(line: bytes) -> str:
    return _COLOURS.sub("", line.decode(errors="replace"))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
