"""Reader of a JSONL file that another process appends to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHOWN_DAMAGE = 3


class JsonlReader:
    """Reads the new lines of a file that may not exist yet.

    Damaged lines are skipped and counted, an incomplete last line waits for its rest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = ""
        """Why the file cannot be read at all; empty when it can."""
        self.damaged: dict[int, str] = {}
        """Reason by line number."""
        self._offset = self._count = 0
        self._last = b""

    def problems(self) -> list[str]:
        """Returns a sentence for each thing that is wrong with the file; a missing file is none."""
        name = self.path.name
        found = [f"{name} cannot be read: {self.unreadable}"] if self.unreadable else []
        damaged = [f"line {number} of {name} is damaged and left out: {reason}" for number, reason in self.damaged.items()]
        found += damaged[:_SHOWN_DAMAGE]
        return found + ([f"{more} more lines of {name} are damaged"] if (more := len(damaged) - _SHOWN_DAMAGE) > 0 else [])

    def replaced(self) -> bool:
        """Returns whether the lines that were read are gone, as after a resume from an earlier step. Then all is read again."""
        if not self._offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                same = file.read(len(self._last)) == self._last
        except FileNotFoundError:
            same = False
        except OSError:
            same = True
        if not same:
            self.damaged, self._offset, self._count, self._last = {}, 0, 0, b""
        return not same

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the new objects, each with the byte offset of its line."""
        self.unreadable = ""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    start, self._offset, self._last = self._offset, self._offset + len(line), line
                    self._count += 1
                    try:
                        content = json.loads(line)
                        if not isinstance(content, dict):
                            raise ValueError("it is not an object")
                    except (ValueError, RecursionError) as error:
                        self.damaged[self._count] = str(error)
                    else:
                        yield start, content
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = error.strerror or str(error)

    def at(self, offset: int) -> dict[str, Any] | None:
        """Returns the object whose line begins at this offset, or None."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                content = json.loads(file.readline())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None
