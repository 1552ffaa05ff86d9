"""Runs one node's command as init runs a pod: none of its processes outlives this one. Standard
library only.

`python launcher.py GRACE_S SCRIPT`, with a pipe as stdin. The runner holds the other end and closes
it to end the node; the system closes it when the runner dies, even by `kill -9`. Then the command's
process group gets SIGTERM, and SIGKILL after GRACE_S seconds. On Linux this process is the
"subreaper" of its descendants: a daemon that left its session and lost its parent becomes its child
and is ended too.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

LEFTOVER_S = 1.0
"""Grace for processes that the command left behind when it ended by itself."""
SIGNALLED = 128
"""Statuses above this are those of processes that a signal ended."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes descendants that lose their parent children of this process (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Returns the ids of the living descendants of `pid`."""
    children: dict[int, list[int]] = {}
    for child, parent in _living():
        children.setdefault(parent, []).append(child)
    found = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def orphans(known: set[int]) -> list[int]:
    """Returns the children that this process did not start itself (Linux; elsewhere there are
    none).
    """
    if sys.platform != "linux":
        return []
    own = os.getpid()
    return [pid for pid, parent in _living() if parent == own and pid not in known]


def end_descendants() -> None:
    """Kills all descendants."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
    reap()


def reap() -> dict[int, int]:
    """Reaps ended children; returns their exit statuses by id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid:
            ended[pid] = exit_status(os.waitstatus_to_exitcode(status))
            pid, status = os.waitpid(-1, os.WNOHANG)
    return ended


def exit_status(code: int) -> int:
    """Converts a status to that of a shell: 128 + N for a process that signal N ended."""
    return code if code >= 0 else SIGNALLED - code


def _living() -> list[tuple[int, int]]:
    """Returns (id, parent's id) of every process that is not a zombie."""
    if not Path("/proc/self/stat").exists():
        return _listed_by_ps()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            stat = (entry / "stat").read_text(errors="replace")
            state, parent, *_ = stat.rpartition(")")[2].split()
            if state != "Z":
                found.append((int(entry.name), int(parent)))
    return found


def _listed_by_ps() -> list[tuple[int, int]]:
    ps = subprocess.Popen(["ps", "-axo", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True)
    found = []
    for line in ps.communicate()[0].splitlines():
        pid, parent, state = line.split()
        if state[0] != "Z" and int(pid) != ps.pid:
            found.append((int(pid), int(parent)))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class _Init:
    """The command, its descendants, and the deadline by which they must end."""

    def __init__(self, script: str) -> None:
        self.status: int | None = None
        self.deadline: float | None = None
        self.main = subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # So that a kill -9 of this process ends at least the command itself.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def end(self, grace_s: float) -> None:
        """Asks the command's group, once, to end within `grace_s` seconds."""
        if self.deadline is None:
            self.deadline = time.monotonic() + grace_s
            self._signal_group(signal.SIGTERM)

    def advance(self) -> bool:
        """Reaps what has ended; False when nothing is left."""
        ended = reap()
        if self.main.pid in ended:
            self.status = self.main.returncode = ended[self.main.pid]
            self.end(LEFTOVER_S)
            self._signal_group(signal.SIGTERM, only_strays=True)
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._signal_group(signal.SIGKILL)
            self._signal_group(signal.SIGKILL, only_strays=True)
        return self.status is None or self._group_lives() or bool(descendants(os.getpid()))

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.main.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _signal_group(self, number: signal.Signals, only_strays: bool = False) -> None:
        """Signals the command's process group, or those descendants that are no longer in it."""
        if not only_strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.main.pid, number)
            return
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) != self.main.pid:
                    os.kill(pid, number)


def run(script: str, grace_s: float) -> int:
    """Runs `script` with bash until it and its descendants are gone; returns its exit status."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    adopt_orphans()
    init = _Init(script)
    watched = [0, wake_read]
    while init.advance():
        # While processes are ending, polls often: a stray's exit may send no SIGCHLD here.
        timeout_s = None if init.deadline is None else 0.05
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if 0 in ready and not os.read(0, 1):
            watched.remove(0)
            init.end(grace_s)
        if wake_read in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(wake_read, 4096)):
            init.end(grace_s)
    assert init.status is not None
    return init.status


if __name__ == "__main__":
    sys.exit(run(sys.argv[2], float(sys.argv[1])))
