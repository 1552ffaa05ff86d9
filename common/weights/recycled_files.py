"""Reuses the space of a discarded large file for the next one.

A file system allocates a new file page by page, which takes several times as long as overwriting an
existing file.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

_MIN_REUSED_BYTES = 1 << 20
"""Smaller files are not reused."""
_NAME = "spare"


def discard(directory: Path) -> None:
    """Removes a directory of files that nobody reads any more, but keeps the largest file next to
    it for reuse.
    """
    with suppress(OSError):  # without a spare the next file is created anew
        largest = max(
            ((file.stat(), file) for file in directory.iterdir()),
            key=lambda found: found[0].st_size,
            default=None,
        )
        # Else another directory has it.
        if largest and largest[0].st_size >= _MIN_REUSED_BYTES and largest[0].st_nlink == 1:
            largest[1].replace(directory.with_name(_NAME))
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def create(target: Path, size: int) -> Iterator[BinaryIO]:
    """Opens a new file of about `size` bytes for writing and truncates it at the end of what was
    written.

    `target` must not exist. The spare next to its directory, if there is one, is overwritten.
    """
    mode: Literal["xb", "r+b"] = "xb"
    if size >= _MIN_REUSED_BYTES and not target.exists():
        with suppress(FileNotFoundError):
            target.parent.with_name(_NAME).rename(target)
            mode = "r+b"
    with target.open(mode) as stream:
        yield stream
        stream.truncate()
