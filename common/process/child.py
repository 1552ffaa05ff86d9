"""Runs a command, and kills its process group when the parent of this script dies.

The parent starts the script as leader of a process group, with a pipe as standard input. The kernel
closes the pipe however the parent dies. `command` returns the command line. Needs only Unix and the
standard library.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def command(words: Sequence[str], stdin: int | None = None) -> list[str]:
    """Returns the command line that runs `words`, with the inherited file descriptor `stdin` as
    input, or no input.
    """
    return [sys.executable, "-I", "-S", __file__, "-" if stdin is None else str(stdin), *words]


def main(stdin: str, words: list[str]) -> int:
    """Runs `words` and forwards SIGTERM. Returns the exit status, 128 + n when signal n ended the
    command.
    """
    threading.Thread(target=_watch_parent, daemon=True).start()
    try:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL if stdin == "-" else int(stdin))
    except OSError as error:
        print(f"cannot run {words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    return status if status >= 0 else 128 - status


def _watch_parent() -> None:
    while os.read(0, 4096):  # nothing is ever written: it returns at end of file
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
