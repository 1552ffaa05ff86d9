"""Trains twice: in one process, and in one that is killed with SIGKILL again and again before it
may finish.

A moment is one of three things. A pattern: the process ends right before the first file event that
it matches (`open a …/metrics.jsonl`, `os.rename …/step_000002.partial`). A number: the process ends
after this many file events in the run's directory. Or, for trials by hand, the seconds (`0.7s`)
after the start.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from common.settings.config import load
from trainer import train_in_process


def main(base: Path, moments: list[str], settings: list[str]) -> None:
    """Trains in `base/unbroken` and `base/broken`. Prints the moment and the exit status of every
    attempt."""
    attempts = [("unbroken", ""), *(("broken", moment) for moment in (*moments, ""))]
    for name, moment in attempts:
        directory = str(base / name)
        config = load(
            [
                *settings,
                "--trainer.run_dir",
                f"{directory}/run",
                "--state_dir",
                f"{directory}/state",
            ],
            {},
        )
        pid = os.fork()  # the child inherits all imports
        if pid == 0:
            if moment and not moment.endswith("s"):
                kill_at(moment, directory)
            train_in_process(config, Console(quiet=True))
            os._exit(0)
        if moment.endswith("s"):
            time.sleep(float(moment[:-1]))
            os.kill(pid, signal.SIGKILL)
        print(moment, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def kill_at(moment: str, directory: str) -> None:
    """Kills this process at a file event, which Python audits in advance; SIGKILL leaves no time
    for cleanup."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in ("open", "os.rename", "os.rmdir", "os.remove", "os.mkdir", "shutil.rmtree"):
            return
        path = str(arguments[0])
        if not path.startswith(directory):
            return
        seen += 1
        text = f"{event} {arguments[1]} {path}" if event == "open" else f"{event} {path}"
        if seen == int(moment) if moment.isdecimal() else re.search(moment, text):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
