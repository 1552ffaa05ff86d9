"""Shows the output of a child process on stderr, in the format of this process's log.

Complaints that repeat are shown a few times: a router says for every request that a worker is gone,
which would bury the line that says why.
"""

import contextlib
import json
import re
import sys
import time

from common.process.logs import structured
from common.process.work_meter import kind_of

_SHOWN = 3
_WINDOW_S = 10.0
_MAX_KINDS = 1000
_COMPLAINT = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL)\b")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Console:
    """Shows the lines of the child `name`; `log_file` has all of them."""

    def __init__(self, name: str, log_file: object) -> None:
        self._name = name
        self._repeats = Repeats(log_file)

    def show(self, lines: list[bytes]) -> None:
        """Prints lines of output on stderr, if it is open."""
        now = time.monotonic()
        plain = [_COLOURS.sub("", line.decode("utf-8", "replace")) for line in lines]
        chosen = [self._repeats.shown(line, now) for line in plain]
        shown = [self._formatted(line) for line in chosen if line is not None]
        if shown:
            with contextlib.suppress(OSError):
                print("\n".join(shown), file=sys.stderr, flush=True)

    def _formatted(self, line: str) -> str:
        """Formats a line like this process's log; what is JSON already is unchanged."""
        formatter = structured()
        if formatter is None:
            return f"{self._name} | {line}"
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                return line
        return formatter.line(self._name, line)


class Repeats:
    """Drops repeated complaints: of those that differ only in numbers, at most `_SHOWN` are shown
    within `_WINDOW_S` seconds, and the last of them says that `log_file` has more.
    """

    def __init__(self, log_file: object) -> None:
        self._log_file = log_file
        # By kind of complaint: when its window began, and how many there were in it.
        self._seen: dict[str, tuple[float, int]] = {}

    def shown(self, line: str, now: float) -> str | None:
        """Returns the line as it is shown at `now` (seconds of the monotonic clock); None if it is
        not.
        """
        if _COMPLAINT.search(line) is None or line.startswith("{"):  # JSON is for programs
            return line
        kind = kind_of(line)
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= _WINDOW_S:
            began = now
            count = 0
        if kind not in self._seen and len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = (began, count + 1)

        if count + 1 < _SHOWN:
            return line
        if count + 1 > _SHOWN:
            return None
        return f"{line} (more like this within {_WINDOW_S:g} s are only in {self._log_file})"
