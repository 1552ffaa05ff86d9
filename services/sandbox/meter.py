"""Measures the time that processes use, for the worker pool and inside the sandbox."""

from __future__ import annotations  # the sandbox's Python may be older than the server's

import os
import time

WALL_TIMES = 10
"""Maximum wall time, as a multiple of the time counted by `Meter`."""


class Meter:
    """Counts the time that processes use: CPU time, and the time in which all of their threads
    wait.

    So a busy machine or other processes cost them no time, but a process cannot wait forever.
    Without `/proc` all time counts.
    """

    def __init__(self, *pids: int) -> None:
        self._pids, self._started, self._used_s, self._processor_s = (
            pids,
            time.monotonic(),
            0.0,
            0.0,
        )
        self._seen, self._processor_s = self._started, self._look()[0]

    @property
    def wall_s(self) -> float:
        """Wall time in seconds since the start."""
        return time.monotonic() - self._started

    def read(self) -> float:
        """Returns the counted seconds since the start."""
        now, (processor_s, waits) = time.monotonic(), self._look()
        self._used_s += max(processor_s - self._processor_s, now - self._seen if waits else 0.0)
        self._seen, self._processor_s = now, processor_s
        return self._used_s

    def _look(self) -> tuple[float, bool]:
        """Returns the CPU seconds so far, and whether all threads are waiting."""
        ticks, waits = 0, True
        try:
            for pid in self._pids:
                state, *numbers = self._stat(f"/proc/{pid}/stat")
                ticks += int(numbers[10]) + int(numbers[11])
                waits = waits and state not in "RD"
            for pid in self._pids if waits else ():
                for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                    waits = waits and self._stat(f"/proc/{pid}/task/{thread}/stat")[0] not in "RD"
        except (OSError, ValueError, IndexError):
            return self._processor_s, True
        return ticks / os.sysconf("SC_CLK_TCK"), waits

    @staticmethod
    def _stat(path: str) -> list[str]:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
