"""Injects scheduled faults into a running job group."""

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tests.chaos.group import Group
from tests.chaos.targets import Process, cut_connections, find, send

Kind = Literal["kill", "stop", "cut", "preempt"]
"""`kill -9` of one process; SIGSTOP, SIGCONT after `hold_s`; its TCP connections shut down; `kill
-9` of a whole node."""
_LOOK_S = 0.05


@dataclass
class Fault:
    """A fault, its moment and its target."""

    step: int
    """The fault occurs after the run has trained this many steps."""
    kind: Kind
    target: str
    """A name that `find` knows."""
    hold_s: float = 0.0
    """Seconds of a stop."""
    cut: int | None = None
    """Connections that a `cut` met."""


def inject(group: Group, faults: Sequence[Fault], limit_s: float) -> list[Fault]:
    """Injects every fault at its moment; returns those injected when the group has ended, at the
    latest after `limit_s` seconds.
    """
    assert group.process is not None
    waiting = list(faults)
    stops: list[threading.Timer] = []
    limit = time.monotonic() + limit_s
    while group.process.poll() is None and time.monotonic() < limit:
        if waiting and group.step() >= waiting[0].step:
            target = find(waiting[0].target, group.processes())
            if target is not None:
                with suppress(ProcessLookupError):  # it has just ended: its successor is met
                    _strike(waiting[0], target, stops)
                    waiting.pop(0)
        time.sleep(_LOOK_S)
    for timer in stops:  # a stopped process must continue before it can be ended
        timer.cancel()
        timer.function(*timer.args)
    return list(faults[: len(faults) - len(waiting)])


def _strike(fault: Fault, target: Process, stops: list[threading.Timer]) -> None:
    if fault.kind == "stop":
        if send(target.pid, signal.SIGSTOP):
            stops.append(threading.Timer(fault.hold_s, send, (target.pid, signal.SIGCONT)))
            stops[-1].daemon = True
            stops[-1].start()
    elif fault.kind == "cut":
        fault.cut = cut_connections(target.pid)
    else:
        send(target.pid, signal.SIGKILL)
