"""Large files that are written over the one that was given up last.

A file system finds room for a new file page by page, which takes several times as long as to write into one that is there.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

_WORTH_IT = 1 << 20
"""Smaller files are removed, and made anew."""
_NAME = "spare"


def retire(directory: Path) -> None:
    """Removes a directory of files, but keeps the largest beside it, to be written over. Nobody may read it any more."""
    with suppress(OSError):  # without a spare the next file is a new one
        largest = max(((file.stat(), file) for file in directory.iterdir()), key=lambda found: found[0].st_size, default=None)
        if largest and largest[0].st_size >= _WORTH_IT and largest[0].st_nlink == 1:  # else another directory has it too
            largest[1].replace(directory.with_name(_NAME))
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def written(target: Path, size: int) -> Iterator[BinaryIO]:
    """Opens a file of about `size` bytes, which must not exist, for writing; it ends where the caller stops.

    It is written over the spare beside its directory if there is one.
    """
    mode: Literal["xb", "r+b"] = "xb"
    if size >= _WORTH_IT and not target.exists():
        with suppress(FileNotFoundError):
            target.parent.with_name(_NAME).rename(target)
            mode = "r+b"
    with target.open(mode) as stream:
        yield stream
        stream.truncate()
