"""Runs a command as init runs a container: nothing that it started outlives it, or this script.

`Child` starts the script as leader of a process group, with a pipe as standard input. The kernel
closes the pipe however the parent dies; then everything is killed. SIGTERM is passed on to the
command. What the command leaves behind gets SIGTERM, and SIGKILL after GRACE_S seconds.

On Linux the script is a "child subreaper": a daemon that leaves the group and loses its parent
becomes the script's own child, so that it is found. Needs only Unix and the standard library.

    python launcher.py GRACE_S STDIN WORD...      # STDIN: a file descriptor, or - for none
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

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.05
# Seconds for killed processes to end; one that waits for a device may take for ever.
_END_S = 5.0
# File descriptor of the pipe from the parent, which never writes to it.
_PARENT = 0


def main(grace_s: float, stdin: str, words: list[str]) -> int:
    """Runs `words`. Returns the exit status, 128 + n when signal n ended the command."""
    adopt_orphans()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the loop below reads their numbers from `woken`
    try:
        command = subprocess.Popen(words, stdin=subprocess.DEVNULL if stdin == "-" else int(stdin))
    except OSError as error:
        print(f"cannot run {words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127

    while command.returncode is None:
        ready, _, _ = select.select([_PARENT, woken], [], [])
        if _PARENT in ready:
            end_children()
            os.killpg(0, signal.SIGKILL)  # elsewhere than on Linux: what is left of the group
        if signal.SIGTERM in os.read(woken, 4096):
            command.send_signal(signal.SIGTERM)
        _reap(command)

    end_children(grace_s)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def adopt_orphans() -> None:
    """Makes descendants that lose their parent children of this process (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _reap(command: "subprocess.Popen[bytes] | None" = None) -> None:
    """Ends the zombies of adopted processes, and notes the status of the command."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if command is not None and pid == command.pid:
                command.returncode = os.waitstatus_to_exitcode(status)


def end_children(grace_s: float = 0.0) -> None:
    """Asks all descendants to end and kills what is left after `grace_s` seconds, or as soon as the
    parent wants it. The children of one that ended become ours, and are found in the next round.
    """
    kill_at = time.monotonic() + grace_s
    asked = set[int]()
    while time.monotonic() < kill_at + _END_S and (children := _children()):
        if time.monotonic() < kill_at:
            for pid in children - asked:
                _send(pid, signal.SIGTERM)
            asked |= children
            if select.select([_PARENT], [], [], _LOOK_S)[0]:
                kill_at = time.monotonic()
        else:
            for pid in children:
                _send(pid, signal.SIGKILL)
            time.sleep(0.001)
        _reap()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _children() -> set[int]:
    """Returns the ids of this process's children; none where there is no /proc."""
    found = set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent …; the name may hold anything
            fields = stat.read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
