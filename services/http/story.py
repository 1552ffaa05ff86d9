"""What a service tells of itself in its log: that it starts and with what, what it waits for, what it serves, and every minute
what it did, or since when it has had nothing to do."""

import asyncio
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import reduce

import prometheus_client

from common import VERSION
from common.config import Config
from services.http.limits import Load

EVERY_S = 60.0
"""Between two lines about the work, or about having none."""
_LOOK_S = 1.0
_CHANGES_S = 10.0
"""Between two lines about why a service is not ready, when the reason keeps changing."""
_ROUTES = 4
"""Routes that a line names, those with the most requests."""
_LOOKS = frozenset(("/health", "/metrics", "/stats", "/status", "/workers"))
"""Somebody looks at the service: that is no work."""


def told(config: Config, *names: str) -> str:
    """Settings by their dotted names, for the line that a process starts with."""
    return ", ".join(f"{name} {reduce(getattr, name.split('.'), config)}" for name in names)


def starts(name: str, settings: str) -> None:
    """The first line of a process: what it is, and the settings that matter."""
    python = f"Python {platform.python_version()}"
    logging.getLogger(name).info("%s %s starts (%s, pid %d): %s", name, VERSION, python, os.getpid(), settings)


def span(seconds: float) -> str:
    """`40 s`, `3 min`, `2 h 5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Work:
    """What a service can tell of its work beside its requests."""

    totals: Callable[[], Mapping[str, float]] = dict
    """Counts since the start by what they count (`answers graded`); a line has what they have grown by."""
    now: Callable[[], str] = str
    """How it stands."""
    busy: Callable[[], bool] = bool
    """Whether there is work that neither requests nor totals show."""
    waits_for: str = "the trainer"
    """Who has to do something while there is no work."""


def count(counter: prometheus_client.Counter) -> float:
    """The value of a counter, over all its labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


@dataclass
class _Route:
    """Requests since the last line."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        self.count, self.seconds, self.longest = self.count + 1, self.seconds + seconds, max(self.longest, seconds)

    def text(self, name: str) -> str:
        return f"{self.count} × {name} ({1000 * self.seconds / self.count:.0f} ms, at most {1000 * self.longest:.0f} ms)"


class Story:
    """The lines of one service.

    Args:
        name: of the service, and of its logger.
        not_ready: why it cannot serve, or None.
        load: what is in work now.
        work: what else there is to tell.
        clock: seconds that never jump.
    """

    def __init__(
        self,
        name: str,
        not_ready: Callable[[], str | None],
        load: Load,
        work: Work,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._not_ready, self._load, self._work, self._clock = name, not_ready, load, work, clock
        self._log = logging.getLogger(name)
        self._began = self._said = self._busy = clock()
        self._refused = load.refused
        self._totals = dict(work.totals())
        self._routes: dict[str, _Route] = {}
        self._failed: Counter[int] = Counter()
        self._answered = 0
        self._last = ""
        self._problem: str | None = None
        self._problem_since: float | None = self._began
        self._problem_said = -_CHANGES_S

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        if route in _LOOKS:
            return
        self._answered += 1
        self._last = f"{method} {route} at {datetime.now().astimezone():%H:%M:%S}"
        self._routes.setdefault(f"{method} {route}", _Route()).add(seconds)
        if status >= 400:
            self._failed[status] += 1

    async def run(self) -> None:
        """Tells until it is cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(min(_LOOK_S, EVERY_S / 4))
        except Exception:  # nobody awaits this
            self._log.exception("nothing more is told of the work of %s", self.name)

    def look(self) -> None:
        """Says what has changed and what is due."""
        now = self._clock()
        self._look_ready(now)
        if now - self._said >= EVERY_S:
            self._log.info("%s", self._minute(now))
            self._said = now

    def ends(self) -> None:
        """The last line."""
        self._log.info("%s ends after %s: %d requests answered", self.name, span(self._clock() - self._began), self._answered)

    def _look_ready(self, now: float) -> None:
        problem = self._not_ready()
        if problem is None:
            if self._problem_since is not None:
                self._log.info("ready after %s", span(now - self._problem_since))
            self._problem = self._problem_since = None
            return
        if self._problem_since is None:
            self._problem_since = now
        if problem != self._problem and now - self._problem_said >= _CHANGES_S:
            self._log.info("not ready: %s", problem)
            self._problem, self._problem_said = problem, now

    def _minute(self, now: float) -> str:
        """The line about the time since the last one."""
        parts = [*self._requests(), *self._grown()]
        if refused := self._load.refused - self._refused:
            parts.append(f"{refused} refused because too much was in work")
        self._refused = self._load.refused
        if self._load.requests:
            parts.append(f"{self._load.requests} in work")
        if parts or self._work.busy():
            self._busy = now
            text = f"in the last {span(now - self._said)}: " + ("; ".join(parts) or "at work")
        else:
            last = f"last request {self._last}; " if self._last else ""
            text = f"idle for {span(now - self._busy)}; {last}waiting for {self._work.waits_for}"
        if self._problem_since is not None:
            text += f"; not ready since {span(now - self._problem_since)}: {self._not_ready()}"
        return text + (f"; {state}" if (state := self._work.now()) else "")

    def _requests(self) -> Iterable[str]:
        routes, self._routes = sorted(self._routes.items(), key=lambda item: -item[1].count), {}
        failed, self._failed = self._failed, Counter()
        for name, route in routes[:_ROUTES]:
            yield route.text(name)
        if rest := sum(route.count for _, route in routes[_ROUTES:]):
            yield f"{rest} other requests"
        if failed:
            yield "answered with " + ", ".join(f"{status} {count} ×" for status, count in sorted(failed.items()))

    def _grown(self) -> Iterable[str]:
        totals = dict(self._work.totals())
        before, self._totals = self._totals, totals
        for name, value in totals.items():
            if grown := value - before.get(name, 0):
                yield f"{grown:.0f} {name}"
