"""Runs a command and takes its whole process group along when the process that started this one is gone.

Started as a script by `services.rollout.process`, as leader of a process group of its own and with a pipe as standard
input. The kernel closes the pipe when the starter dies, however it dies; then the group is killed: the command, its
children and this process. Works on every Unix and needs nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Runs `command` to its end; SIGTERM is passed on. Returns its exit status, 128 + n when signal n ended it."""
    threading.Thread(target=_watch_starter, daemon=True).start()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    return status if status >= 0 else 128 - status


def _watch_starter() -> None:
    while os.read(0, 4096):  # nothing is ever written: this returns at the end of file
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
