"""Runs one node's command as init runs a pod: none of its processes outlives this one.

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

import psutil

LEFTOVER_S = 1.0
"""Grace for processes that the command left behind when it ended by itself."""
SIGNALLED = 128
"""Statuses above this are those of processes that a signal ended."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes descendants that lose their parent children of this process (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """Returns all descendants of this process."""
    return psutil.Process().children(recursive=True)


def end_descendants() -> None:
    """Kills all descendants."""
    while below := descendants():
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        reap()
        time.sleep(0.01)


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
            self._signal_strays(signal.SIGTERM)
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._signal_group(signal.SIGKILL)
            self._signal_strays(signal.SIGKILL)
        if self.status is None or descendants():
            return True
        self._signal_group(signal.SIGKILL)  # where orphans are no descendants (macOS)
        return False

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.main.pid, number)

    def _signal_strays(self, number: signal.Signals) -> None:
        """Signals those descendants that are no longer in the command's group."""
        for process in descendants():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) != self.main.pid:
                    process.send_signal(number)


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
