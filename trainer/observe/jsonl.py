"""Readers of a JSONL file that another process appends to, and that may be damaged."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import orjson

from common import Json

_SHOWN_DAMAGE = 3
# How much `last_steps` reads of the end of a file.
_TAIL_BYTES = 4 << 20
T = TypeVar("T")


class JsonlReader(Generic[T]):
    """Reads the new lines of a file that may not exist yet; `decode` turns a line into an object.

    Damaged lines are skipped and counted; an incomplete last line is read once it is complete.
    """

    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None:
        self.path = path
        self.unreadable = ""
        """Why the file cannot be read at all; empty when it can."""
        self._decode = decode
        self._start_over()

    def _start_over(self) -> None:
        self.damaged: dict[int, str] = {}
        """Reason by line number."""
        self.done = 0
        """Bytes that were read."""
        self._count = 0
        # The line that ends there.
        self._last = b""

    def problems(self) -> list[str]:
        """Returns a sentence for each problem with the file; a missing file is no problem."""
        name = self.path.name
        found = [f"{name} cannot be read: {self.unreadable}"] if self.unreadable else []
        for number, reason in self.damaged.items():
            found.append(f"line {number} of {name} is damaged and left out: {reason}")
        if len(self.damaged) > _SHOWN_DAMAGE:
            more = len(found) - _SHOWN_DAMAGE
            found[_SHOWN_DAMAGE:] = [f"{more} more lines of {name} are damaged"]
        return found

    def replaced(self) -> bool:
        """Returns whether lines already read are gone, as after a resume from an earlier step; if
        so, starts over.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.done - len(self._last))
                same = file.read(len(self._last)) == self._last
        except FileNotFoundError:
            same = not self.done
        except OSError:  # `read` says why
            same = True
        if not same:
            self._start_over()
        return not same

    def read(self) -> Iterator[T]:
        """Yields the object of each new line."""
        self.unreadable = ""
        try:
            with self.path.open("rb") as file:
                file.seek(self.done)
                # A line without an end is still being written.
                while (line := file.readline()).endswith(b"\n"):
                    self.done += len(line)
                    self._last = line
                    self._count += 1
                    try:
                        content = self._decode(line)
                    except (ValueError, RecursionError) as error:
                        self.damaged[self._count] = str(error)
                    else:
                        yield content
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = error.strerror or str(error)


def last_steps(path: Path, count: int) -> list[Json]:
    """Returns the last whole lines that belong to a step; damaged ones are left out."""
    reader = JsonlReader(path, parsed_line)
    with suppress(OSError):
        # The reading may begin within a line, which then counts as damaged.
        reader.done = max(0, path.stat().st_size - _TAIL_BYTES)
    return list(deque(reader.read(), maxlen=count))


def parsed(line: bytes) -> Json:
    """Returns the object of a line, which may have NaN. Raises ValueError."""
    try:
        content = orjson.loads(line)
    except ValueError:
        content = json.loads(line)  # has NaN and infinity
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def parsed_line(line: bytes) -> Json:
    """Returns the object of a line about a step of a run. Raises ValueError."""
    content = parsed(line)
    if not isinstance(content.get("step"), int):
        raise ValueError("it names no step")
    return content
