"""Reader of a JSONL file that another process appends to."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

_SHOWN_DAMAGE = 3


@dataclass
class _Tail:
    """The last lines of a file, which are read first."""

    start: int
    """Byte offset of the first line."""
    end: int
    last: bytes
    count: int = 0
    damaged: dict[int, str] = field(default_factory=dict)
    """Reason by line number within the tail."""


class JsonlReader:
    """Reads the new lines of a file that may not exist yet.

    Damaged lines are skipped and counted; an incomplete last line is read once it is complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = ""
        """Why the file cannot be read at all; empty when it can."""
        self._start_over()

    def _start_over(self) -> None:
        self.damaged: dict[int, str] = {}
        """Reason by line number."""
        self._offset = 0
        self._count = 0
        """Lines read, without those of the tail."""
        self._last = b""
        """The line that ends at the offset."""
        self._tail: _Tail | None = None

    @property
    def done(self) -> int:
        """The number of bytes read."""
        return self._offset + (self._tail.end - self._tail.start if self._tail else 0)

    def problems(self) -> list[str]:
        """Returns a sentence for each problem with the file; a missing file is no problem."""
        name = self.path.name
        found = []
        if self.unreadable:
            found.append(f"{name} cannot be read: {self.unreadable}")
        for number, reason in list(self.damaged.items())[:_SHOWN_DAMAGE]:
            found.append(f"line {number} of {name} is damaged and left out: {reason}")
        more = len(self.damaged) - _SHOWN_DAMAGE
        if more > 0:
            found.append(f"{more} more lines of {name} are damaged")
        return found

    def replaced(self) -> bool:
        """Returns whether lines already read are gone, as after a resume from an earlier step; if
        so, starts over.
        """
        ends = []
        if self._offset:
            ends.append((self._offset, self._last))
        if self._tail:
            ends.append((self._tail.end, self._tail.last))
        try:
            same = not ends or self._has(ends)
        except FileNotFoundError:
            same = False
        except OSError:
            same = True
        if not same:
            self._start_over()
        return not same

    def _has(self, ends: list[tuple[int, bytes]]) -> bool:
        """Returns whether each of these lines still ends at its offset."""
        with self.path.open("rb") as file:
            for end, line in ends:
                file.seek(end - len(line))
                if file.read(len(line)) != line:
                    return False
        return True

    def read(self, newest_bytes: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the byte offset and the object of each new line.

        When a long file is read for the first time, the lines in its last `newest_bytes` come
        first.
        """
        self.unreadable = ""
        try:
            with self.path.open("rb") as file:
                if newest_bytes and not self._offset and self._tail is None:
                    yield from self._read_tail(file, newest_bytes)
                file.seek(self._offset)
                while (line := file.readline()).endswith(b"\n"):
                    start = self._offset
                    self._offset += len(line)
                    self._last = line
                    self._count += 1
                    content = _parsed(line, self.damaged, self._count)
                    if self._tail is not None and self._offset >= self._tail.start:
                        file.seek(self._pass_tail(self._tail))
                    if content is not None:
                        yield start, content
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = error.strerror or str(error)

    def _read_tail(self, file: BinaryIO, size: int) -> list[tuple[int, dict[str, Any]]]:
        whole = file.seek(0, os.SEEK_END)
        if whole <= 2 * size:
            return []
        file.seek(whole - size)
        file.readline()
        start = offset = file.tell()
        lines = [line for line in file if line.endswith(b"\n")]
        if not lines:
            return []
        end = start + sum(map(len, lines))
        tail = _Tail(start, end, last=lines[-1], count=len(lines))
        self._tail = tail
        found = []
        for number, line in enumerate(lines, 1):
            content = _parsed(line, tail.damaged, number)
            if content is not None:
                found.append((offset, content))
            offset += len(line)
        return found

    def _pass_tail(self, tail: _Tail) -> int:
        """Continues after the tail, which was read before; returns the offset."""
        for number, reason in tail.damaged.items():
            self.damaged[self._count + number] = reason
        self._offset = tail.end
        self._last = tail.last
        self._tail = None
        self._count += tail.count
        return tail.end

    def at(self, offset: int) -> dict[str, Any] | None:
        """Returns the object whose line begins at this offset, or None."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                content = json.loads(file.readline())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None


def _parsed(line: bytes, damaged: dict[int, str], number: int) -> dict[str, Any] | None:
    """Returns the object of a line; for a damaged line, returns None and records why in
    `damaged`.
    """
    try:
        content = orjson.loads(line)
    except ValueError:
        try:
            content = json.loads(line)  # has NaN and infinity
        except (ValueError, RecursionError) as error:
            damaged[number] = str(error)
            return None
    if not isinstance(content, dict):
        damaged[number] = "it is not an object"
        return None
    return content
