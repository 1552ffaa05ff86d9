"""Complaints of a child process that repeat: a router says for every request that a worker is gone,
which would bury the line that says why.
"""

import re

from common.process.work_meter import kind_of

_SHOWN = 3
_WINDOW_S = 10.0
_MAX_KINDS = 1000
_COMPLAINT = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL)\b")


class Repeats:
    """Chooses which lines are shown: of complaints that differ only in figures and names with
    figures, `_SHOWN` within `_WINDOW_S` seconds. The last of them says so. `log_file` has all.
    """

    def __init__(self, log_file: object) -> None:
        self._log_file = log_file
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
