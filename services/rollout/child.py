"""Runs a command, and kills its process group when the parent of this script dies.

`services.rollout.process` starts the script as leader of a process group, with a pipe as standard input. The kernel closes
the pipe when the parent dies in any way. Needs only Unix and the standard library.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Runs `command` and forwards SIGTERM. Returns its exit status, 128 + n when signal n ended it."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    return status if status >= 0 else 128 - status


def _watch_parent() -> None:
    while os.read(0, 4096):  # nothing is ever written: it returns at end of file
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
