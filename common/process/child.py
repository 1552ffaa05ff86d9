"""Runs a command, and kills everything that it started when it ends or the parent of this script
dies.

The parent starts the script as leader of a process group, with a pipe as standard input. The kernel
closes the pipe however the parent dies. On Linux the script adopts processes that leave the group
and lose their parents. `command` returns the command line. Needs only Unix and the standard
library.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0
"""Seconds for killed processes to end; one that waits for a device may take for ever."""


def command(words: Sequence[str], stdin: int | None = None) -> list[str]:
    """Returns the command line that runs `words`, with the inherited file descriptor `stdin` as
    input, or no input.
    """
    return [sys.executable, "-I", "-S", __file__, "-" if stdin is None else str(stdin), *words]


def main(stdin: str, words: list[str]) -> int:
    """Runs `words` and forwards SIGTERM. Returns the exit status, 128 + n when signal n ended the
    command.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    threading.Thread(target=_watch_parent, daemon=True).start()
    try:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL if stdin == "-" else int(stdin))
    except OSError as error:
        print(f"cannot run {words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = _wait(child)
    _kill_descendants()
    return status if status >= 0 else 128 - status


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Returns the exit status of the command; ends the zombies of adopted processes meanwhile."""
    with contextlib.suppress(ChildProcessError):  # `_watch_parent` was faster
        while sys.platform == "linux":
            # It only looks: the status stays there for `child.wait`.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended is None or ended.si_pid == child.pid:
                break
            os.waitpid(ended.si_pid, os.WNOHANG)
    return child.wait()


def _kill_descendants() -> None:
    """Kills all children until there are none: the children of a killed one become ours."""
    if sys.platform != "linux":
        return
    stop_at = time.monotonic() + _END_S
    while time.monotonic() < stop_at:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> list[int]:
    """Returns the ids of this process's children."""
    own = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # pid (name) state parent …; the name may hold anything
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == own:
                    found.append(int(entry.name))
    return found


def _watch_parent() -> None:
    while os.read(0, 4096):  # nothing is ever written: it returns at end of file
        pass
    _kill_descendants()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
