"""Tells which processes are alive, and which belong to a run."""

from pathlib import Path

import psutil


def alive(pid: int) -> bool:
    """Returns whether the process is running. A zombie has ended, even if nobody has waited for
    it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(mark: str, words: str = "") -> list[int]:
    """Returns the ids of the processes that inherited `mark` and have `words` in their command
    line."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                command = (
                    (directory / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                if (
                    command
                    and words in command
                    and mark.encode() in (directory / "environ").read_bytes()
                ):
                    found.append(int(directory.name))
            except OSError:  # the process ended meanwhile
                continue
    return found
