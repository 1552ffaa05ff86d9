"""Clocks that split the seconds of a step into stages."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STAGES = ("update", "publish", "evaluation", "stragglers", "generation", "reward", "replay")
"""The stages of a step in order of precedence: while several are active, the time counts for the
first. In `stragglers` enough groups for a batch are ready, but the trainer waits for the oldest
(`trainer.when_stale` `wait`)."""
PUBLISHING = "publishing"
"""Publishing in the background: it comes last, and counts as `publish` while nothing else is
active."""
WAITING = "waiting"
"""The time in which no stage is active."""
WAITS_FOR_BATCH = "waiting for the batch"
"""Begins the name of the place at which the loop waits for groups, which a diagnosis knows."""


class StageClock:
    """Splits wall time into stages that may overlap and come from several threads; the parts add up
    to the whole.

    `took` is called with the stage and the seconds of every single activity.
    """

    def __init__(self, took: Callable[[str, float], None] = lambda stage, seconds: None) -> None:
        self._took = took
        self._lock = threading.Lock()
        self._active = dict.fromkeys((*STAGES, PUBLISHING), 0)
        self._seconds = dict.fromkeys((*STAGES, WAITING), 0.0)
        self._since = time.perf_counter()
        self._lap_since = self._since
        self._generating = 0.0
        self._groups_seconds = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time inside the block for `name`, one of `STAGES` or `PUBLISHING`."""
        began = time.perf_counter()
        with self._lock:
            self._attribute()
            self._active[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._attribute()
                self._active[name] -= 1
            self._took(name, time.perf_counter() - began)

    def active(self) -> str:
        """Returns the stages that are active now as text, such as `generation 12, reward 1`."""
        with self._lock:
            counts = [f"{name} {count}" for name, count in self._active.items() if count]
        return ", ".join(counts) or "nothing"

    def is_active(self, *stages: str) -> bool:
        """Whether one of these stages is active."""
        return any(self._active[stage] for stage in stages)

    def lap(self) -> dict[str, float]:
        """Returns the seconds by stage since the last lap."""
        with self._lock:
            self._attribute()
            seconds = self._seconds
            self._seconds = dict.fromkeys(seconds, 0.0)
            return seconds

    def generating(self) -> tuple[float, float]:
        """Returns the share of wall time with generation active, and the mean number of groups,
        since the last call.
        """
        with self._lock:
            self._attribute()
            wall = max(1e-9, self._since - self._lap_since)
            share = self._generating / wall
            mean_groups = self._groups_seconds / wall
            self._generating = 0.0
            self._groups_seconds = 0.0
            self._lap_since = self._since
            return share, mean_groups

    def _attribute(self) -> None:
        """Counts the time since the last call for the first stage that was active."""
        now = time.perf_counter()
        seconds = now - self._since
        groups = self._active["generation"]
        if groups:
            self._generating += seconds
            self._groups_seconds += groups * seconds
        stage = next((name for name, count in self._active.items() if count), WAITING)
        self._seconds["publish" if stage == PUBLISHING else stage] += seconds
        self._since = now


class CpuClock:
    """Measures the CPU seconds that `read` returns; by default those of all threads of this
    process.
    """

    def __init__(self, read: Callable[[], float] = time.process_time) -> None:
        self._read = read
        self._since = read()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Excludes the seconds used inside the block."""
        start = self._read()
        yield
        self._since += self._read() - start

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        since = self._since
        self._since = self._read()
        return self._since - since
