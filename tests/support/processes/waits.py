"""Waits for a condition, and says at once why it will not come."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

LIMIT_S = 400.0
"""Less than the limit of every suite (500 s in `make test`), which says less."""
_LOOK_S = 0.02
_CHARS = 6000


class Process(Protocol):
    """A Popen, or what has its `poll`."""

    def poll(self) -> int | None: ...


def until(
    holds: Callable[[], object],
    said: str | Path | Callable[[], str] = "it does not come",
    *processes: Process,
    limit_s: float = LIMIT_S,
) -> None:
    """Waits until the condition holds. Fails with what was said (the end of a log if it is a path)
    after `limit_s` seconds, or when one of the processes has ended before that.
    """
    wait = _Wait(holds, said, processes, limit_s)
    while not wait.is_over():
        time.sleep(_LOOK_S)


async def comes(
    holds: Callable[[], object],
    said: str | Path | Callable[[], str] = "it does not come",
    *processes: Process,
    limit_s: float = LIMIT_S,
) -> None:
    """Does the same as `until` in an event loop."""
    wait = _Wait(holds, said, processes, limit_s)
    while not wait.is_over():  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


class _Wait:
    def __init__(
        self,
        holds: Callable[[], object],
        said: str | Path | Callable[[], str],
        processes: tuple[Process, ...],
        limit_s: float,
    ) -> None:
        self._holds = holds
        self._said = said
        self._processes = processes
        self._limit = time.monotonic() + limit_s

    def is_over(self) -> bool:
        # Looked at before the condition: a process may make it hold and end at once.
        is_late = time.monotonic() > self._limit
        ended = [each.poll() for each in self._processes]
        if self._holds():
            return True
        assert not any(status is not None for status in ended), f"{ended}: {self._text()}"
        assert not is_late, f"never: {self._text()}"
        return False

    def _text(self) -> str:
        if isinstance(self._said, Path):
            said = self._said.read_text(errors="replace") if self._said.exists() else "no log"
        else:
            said = self._said if isinstance(self._said, str) else self._said()
        return said[-_CHARS:]
