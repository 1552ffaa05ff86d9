"""Injects scheduled faults into a running job group and measures the time to recovery."""

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.faults import Fault
from tests.chaos.group import Group
from tests.chaos.targets import Process, cut_connections, find, health_url, healthy, send

_LOOK_S = 0.05
_HEALTH_S = 0.2


@dataclass
class Injected:
    """An injected fault."""

    fault: Fault
    at: float
    """Seconds since 1970."""
    at_step: int
    cut: int = 0
    """Connections."""
    healthy_s: float | None = None
    """Seconds from the fault until its target (a new process after a kill) was running and healthy;
    None if it was not before the run ended."""

    def next_step_s(self, group: Group) -> float | None:
        """Returns the seconds from the fault to the end of the next training step; None if there
        was none."""
        return min((when - self.at for when, _ in group.step_times if when > self.at), default=None)


def inject(group: Group, faults: Sequence[Fault], limit_s: float) -> list[Injected]:
    """Injects every fault at its moment; returns when the group has ended, at the latest after
    `limit_s` seconds.

    Faults whose moment has not come by then are left out.
    """
    assert group.process is not None
    done: list[Injected] = []
    stops: list[threading.Timer] = []
    watchers: list[threading.Thread] = []
    waiting, over = list(faults), threading.Event()
    due: float | None = None
    start = time.monotonic()
    try:
        while group.process.poll() is None and time.monotonic() - start < limit_s:
            if waiting and due is None and group.step() >= waiting[0].step:
                due = time.monotonic() + waiting[0].after_s
            if due is not None and time.monotonic() >= due:
                target = find(waiting[0].target, group.processes())
                if target is not None:
                    fault, due = waiting.pop(0), None
                    done.append(_strike(group, fault, target, stops))
                    watchers.append(
                        threading.Thread(
                            target=_watch, args=(group, done[-1], target, over), daemon=True
                        )
                    )
                    watchers[-1].start()
            time.sleep(_LOOK_S)
    finally:
        for timer in stops:  # a stopped process must continue before it can be ended
            timer.cancel()
            timer.function(*timer.args)
    over.set()
    for watcher in watchers:
        watcher.join()
    return done


def _strike(group: Group, fault: Fault, target: Process, stops: list[threading.Timer]) -> Injected:
    injected = Injected(fault, time.time(), group.step())
    if fault.kind == "stop":
        if send(target.pid, signal.SIGSTOP):
            stops.append(threading.Timer(fault.hold_s, send, (target.pid, signal.SIGCONT)))
            stops[-1].daemon = True
            stops[-1].start()
    elif fault.kind == "cut":
        injected.cut = cut_connections(target.pid)
    else:
        send(target.pid, signal.SIGKILL)
    return injected


def _watch(group: Group, injected: Injected, hit: Process, over: threading.Event) -> None:
    """Sets `healthy_s` if the target recovers before the run is over."""
    assert group.process is not None
    killed = injected.fault.kind in ("kill", "preempt")
    config = group.config()
    while group.process.poll() is None and not over.wait(_HEALTH_S):
        running = group.processes()
        now = find(injected.fault.target, running)
        if now is not None and now.state != "T" and not (killed and now.pid == hit.pid):
            url = health_url(injected.fault.target, config, running)
            if url is None or healthy(url):
                injected.healthy_s = time.time() - injected.at
                return
