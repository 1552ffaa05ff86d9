"""Whose turn it is: work waits by line, and each line with work has its turn in turn."""

import asyncio
from collections import deque


class Turns:
    """Operations that wait, by line (a run or a sampler).

    With `in_order`, only the operation with the next number of a line can have a turn, and one at a
    time: the client may send later ones first.
    """

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self._waiting: dict[str, set[int]] = {}
        self._next: dict[str, int] = {}
        self._lines: deque[str] = deque()
        """Those that can have a turn."""
        self._busy: set[str] = set()
        self._some = asyncio.Event()

    def start(self, line: str, number: int) -> None:
        """Says which number a line continues with."""
        self._next[line] = number

    def following(self, line: str) -> int:
        """Returns the number that a line continues with."""
        return self._next.get(line, 0)

    def waiting(self, line: str) -> int:
        return len(self._waiting.get(line, ()))

    def add(self, line: str, number: int) -> None:
        self._waiting.setdefault(line, set()).add(number)
        self._queue(line)

    def drop(self, line: str, number: int) -> bool:
        """Removes an operation that still waits; returns False when there is none."""
        if number not in self._waiting.get(line, ()):
            return False
        self._waiting[line].remove(number)
        return True

    def forget(self, line: str) -> None:
        """Removes a line with all that waits in it."""
        self._waiting.pop(line, None)
        self._next.pop(line, None)
        self._busy.discard(line)

    async def take(self) -> tuple[str, int]:
        """Returns the operation whose turn it is."""
        while True:
            while not self._lines:
                self._some.clear()
                await self._some.wait()
            line = self._lines.popleft()
            number = self._first(line)
            if number is None:  # it was dropped
                continue
            self._waiting[line].remove(number)
            if self._in_order:
                self._busy.add(line)
            else:
                self._queue(line)
            return line, number

    def done(self, line: str, number: int) -> None:
        """Ends the turn of a line in order."""
        self._next[line] = number + 1
        self._busy.discard(line)
        self._queue(line)

    def _first(self, line: str) -> int | None:
        waiting = self._waiting.get(line)
        if not waiting:
            self._waiting.pop(line, None)
            return None
        if not self._in_order:
            return min(waiting)
        following = self.following(line)
        return following if following in waiting else None

    def _queue(self, line: str) -> None:
        if line in self._lines or line in self._busy or self._first(line) is None:
            return
        self._lines.append(line)
        self._some.set()
