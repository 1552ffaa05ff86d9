"""Standard output that drops lines instead of raising: a run goes on without a console."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

log = logging.getLogger("run")


class Output:
    """Drops a line when its reader is gone (`| head`, a closed terminal), when the disk behind it
    is full, or when its encoding lacks a character; the log says so once.

    It always writes to the present `sys.stdout`, which a notebook or a test may replace.
    """

    def __init__(self) -> None:
        self._is_said = False

    @property
    def encoding(self) -> str:
        """The encoding of its text."""
        return getattr(_stream(), "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        with suppress(AttributeError, ValueError):  # there is none, or it was closed
            return bool(_stream().isatty())
        return False

    def fileno(self) -> int:
        """Returns its file descriptor. Raises what the stream raises without one."""
        return int(_stream().fileno())

    def write(self, text: str) -> int:
        """Writes text if that is possible."""
        known = text.encode(self.encoding, "replace").decode(self.encoding)
        try:
            _stream().write(known)
        except (OSError, ValueError, AttributeError) as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered if that is possible."""
        try:
            _stream().flush()
        except (OSError, ValueError, AttributeError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            # Nobody will ever read it; without this, Python fails again at its exit.
            with Path(os.devnull).open("wb") as nothing, suppress(OSError):
                os.dup2(nothing.fileno(), self.fileno())
        if not self._is_said:
            self._is_said = True
            log.warning(
                "standard output takes no more lines (%s): the run goes on without it; its numbers "
                "are in metrics.jsonl",
                error,
            )


def _stream() -> IO[Any]:
    """Returns the stream behind what rich puts in its place while it shows a progress bar."""
    stream: IO[Any] = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return stream
