"""Finds the processes of a run by an environment variable that they inherited."""

from pathlib import Path


def marked(mark: str, words: str = "") -> list[int]:
    """Returns the ids of the processes that inherited `mark` and have `words` in their command line."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and words in command and mark.encode() in (directory / "environ").read_bytes():
                    found.append(int(directory.name))
            except OSError:  # the process ended meanwhile
                continue
    return found
