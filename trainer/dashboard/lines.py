"""A JSONL file that somebody else writes, read on from where it was left."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class Lines:
    """Follows one file. What is damaged is left out and counted; a last line that is not complete is read when it is.

    Args:
        path: need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = ""
        """Why the file cannot be read at all, if so."""
        self.damaged: dict[int, str] = {}
        """What is wrong, by number of the line."""
        self._offset = self._count = 0
        self._last = b""

    def is_another(self) -> bool:
        """Whether what was read is no longer there: the run goes on from an earlier step, or it is another run.

        Then everything is read again.
        """
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
        """The objects that are new, each with the byte at which its line begins."""
        self.unreadable = ""
        try:
            with self.path.open("rb") as file:
                yield from self._read(file)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = error.strerror or str(error)

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
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

    def at(self, offset: int) -> dict[str, Any] | None:
        """The object whose line begins there; None when there is none any more."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                content = json.loads(file.readline())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None
