"""Measures the time that processes use, for the worker pool and inside the sandbox."""

from __future__ import annotations  # the sandbox's Python may be older than the server's

import os
import time

WALL_TIMES = 10
"""Maximum wall time, as a multiple of the time counted by `Meter`."""
# States of a thread that runs, or that waits for a disk.
_BUSY = "RD"


class Meter:
    """Counts the time that processes use: CPU time, and the time in which all of their threads
    wait.

    So a busy machine or other processes cost them no time, but a process cannot wait forever.
    Without `/proc` all time counts.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._started = time.monotonic()
        self._counted_s = 0.0
        self._read_at = self._started
        self._cpu_s = 0.0
        self._cpu_s, _ = self._look()

    @property
    def wall_s(self) -> float:
        """Wall time in seconds since the start."""
        return time.monotonic() - self._started

    def read(self) -> float:
        """Returns the counted seconds since the start."""
        now = time.monotonic()
        cpu_s, waits = self._look()
        waited_s = now - self._read_at if waits else 0.0
        self._counted_s += max(cpu_s - self._cpu_s, waited_s)
        self._read_at = now
        self._cpu_s = cpu_s
        return self._counted_s

    def _look(self) -> tuple[float, bool]:
        """Returns the CPU seconds so far, and whether all threads are waiting."""
        ticks = 0
        waits = True
        try:
            for pid in self._pids:
                state, *numbers = self._stat(f"/proc/{pid}/stat")
                ticks += int(numbers[10]) + int(numbers[11])  # user and system time
                waits = waits and state not in _BUSY
            if waits:
                waits = all(self._threads_wait(pid) for pid in self._pids)
        except (OSError, ValueError, IndexError):
            return self._cpu_s, True
        return ticks / os.sysconf("SC_CLK_TCK"), waits

    def _threads_wait(self, pid: int) -> bool:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        return all(
            self._stat(f"/proc/{pid}/task/{thread}/stat")[0] not in _BUSY for thread in threads
        )

    @staticmethod
    def _stat(path: str) -> list[str]:
        """Returns the fields after the name of the program, which may contain spaces."""
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
