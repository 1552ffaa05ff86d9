"""Evidence that processes load or save something, from the outside: what they read, write and take
as memory, and what they say.

Processor time is no evidence: a process that waits for another GPU spins.
"""

import contextlib
import os
import re
from pathlib import Path

STEP_BYTES = 16 << 20
"""Counted as one step of work. Answers to probes are a few kB a second, so that they alone are no
progress within minutes."""
_IO = re.compile(rb"^(?:rchar|wchar): (\d+)$", re.MULTILINE)
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_FIGURES = re.compile(r"\S*\d\S*|[^\w\s]+")
_SHARE = re.compile(r"(\d+)\s*/\s*\d+|(\d+)\s*%")
_MAX_KINDS = 10_000
_MAX_LINE = 4096


class WorkMeter:
    """Measures the work of a process and its descendants, in steps of 16 MiB, since it was made.

    The bytes are those of `read` and `write` (not of sockets that use `recv`) and the peaks of
    memory, which include pages of mapped files. Without `/proc` it stays 0.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._bytes: dict[int, int] = {}
        self._total = 0
        # Bytes that the meter itself has read, which are no work.
        self._own = 0

    def read(self) -> int:
        """Returns the steps so far."""
        now = {pid: self._bytes_of(pid) for pid in self._family()}
        if os.getpid() in now:
            now[os.getpid()] -= self._own
        for pid, count in now.items():
            self._total += max(0, count - self._bytes.get(pid, 0))
        self._bytes = now
        return self._total // STEP_BYTES

    def _family(self) -> set[int]:
        """Returns the process and its descendants."""
        children = dict[int, list[int]]()
        with contextlib.suppress(OSError):
            for entry in Path("/proc").iterdir():
                if not entry.name.isdecimal():
                    continue
                # pid (name) state parent …; the name may hold anything
                words = self._content(entry / "stat").rpartition(b")")[2].split()
                if len(words) > 1:
                    children.setdefault(int(words[1]), []).append(int(entry.name))

        found = set[int]()
        waiting = [self._root]
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting += children.get(pid, [])
        return found

    def _bytes_of(self, pid: int) -> int:
        """Returns the bytes that a process has read and written, and its peak of memory."""
        directory = Path(f"/proc/{pid}")
        peak = _PEAK.search(self._content(directory / "status"))
        count = int(peak[1]) << 10 if peak else 0
        return count + sum(map(int, _IO.findall(self._content(directory / "io"))))

    def _content(self, path: Path) -> bytes:
        """Returns what is in a file of `/proc`; nothing when the process has ended."""
        try:
            content = path.read_bytes()
        except OSError:
            return b""
        self._own += len(content)
        return content


def kind_of(line: str) -> str:
    """Returns a line without its numbers and punctuation, so that two lines which differ only in
    numbers are equal.
    """
    return " ".join(_FIGURES.sub(" ", line).split())


class News:
    """Counts the lines in which a process says something new.

    A line is new if no earlier one had the same words, whatever their numbers: `still waiting after
    60 s` counts once. A progress bar counts again when its first share (`7/19`, `36%`) has grown.
    """

    def __init__(self) -> None:
        self.count = 0
        self._shares: dict[str, int] = {}
        self._rest = ""

    def feed(self, text: str) -> None:
        """Takes the next piece of the output."""
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        self._rest = self._rest[-_MAX_LINE:]
        for line in lines:
            self._take(line[:_MAX_LINE])

    def _take(self, line: str) -> None:
        kind = kind_of(line)
        share = -1
        found = _SHARE.search(line)
        if found:
            share = int(found[1] or found[2])
        if not kind and share < 0:
            return

        known = self._shares.get(kind)
        if known is None and len(self._shares) >= _MAX_KINDS:
            return
        if known is None or share > known:
            self._shares[kind] = share
            self.count += 1
