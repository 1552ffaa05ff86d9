"""Output of a local run: the merged lines of all nodes, or one node unchanged."""

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = 31
_BOLD = 1
_OWN = "jobgroup"


class Screen:
    """Writes to stdout: lines with the name of their node, or the raw bytes of the node to
    `follow`.

    The runner's own lines go into the merged output too, or to stderr while a node is followed.
    """

    def __init__(self, names: Sequence[str], follow: str | None = None) -> None:
        self.follow = follow
        self.hushed: set[str] = set()
        """Nodes whose lines are no longer shown; their logs have them."""
        self._own = sys.stderr if follow else sys.stdout
        self._colourful = self._own.isatty() and not os.environ.get("NO_COLOR")
        width = max(len(name) for name in (*names, _OWN))
        colours = itertools.cycle(COLOURS)
        self._prefixes = {_OWN: self._coloured(f"{_OWN.ljust(width)} | ", _BOLD).encode()}
        for name in names:
            text = self._coloured(f"{name.ljust(width)} | ", next(colours))
            self._prefixes[name] = text.encode()

    def line(self, name: str, text: bytes) -> None:
        if self.follow is None and name not in self.hushed:
            self._write(self._prefixes[name] + _shown(text) + b"\n")

    def raw(self, data: bytes) -> None:
        self._write(data, sys.stdout)

    def say(self, text: str, *, loud: bool = False) -> None:
        for line in text.splitlines():
            shown = self._coloured(line, _RED) if loud else line
            self._write(self._prefixes[_OWN] + shown.encode(errors="replace") + b"\n")

    def tail(self, name: str, lines: Sequence[bytes], log: Path) -> None:
        if not lines:
            return
        self.say(f"the last {len(lines)} lines of {name} but requests (all in {log}):", loud=True)
        for line in lines:
            self._write(b"    " + _shown(line) + b"\n")

    def plain(self, text: str) -> None:
        self._write(text.encode(errors="replace") + b"\n")

    def _coloured(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colourful else text

    def _write(self, data: bytes, stream: TextIO | None = None) -> None:
        stream = stream or self._own
        try:
            stream.buffer.write(data)
            stream.buffer.flush()
        except BrokenPipeError:
            # The reader went away (`| head`): as if the terminal had been closed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            os.kill(os.getpid(), signal.SIGHUP)


def _shown(line: bytes) -> bytes:
    """Returns what a terminal would show of a line: of a progress bar, its last state."""
    return line.rstrip(b"\r\n").rpartition(b"\r")[2]
