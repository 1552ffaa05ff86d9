"""Flips bits in a stored file: what is served does not change, or an error names the file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.process.storage import StorageFailed


def check_flipped_bits(
    directory: Path, file: str, served: Callable[[Path], Any], *, flips: int, seed: int
) -> None:
    """Flips one bit of a file at a time, in copies of its directory.

    Args:
        directory: what is stored; it is left as it is.
        file: the path of the file in it.
        served: returns what a service serves from a directory.
        flips: how many bits are tried.
        seed: which ones.
    """
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    expected = served(copy)
    size = (directory / file).stat().st_size
    chance = random.Random(seed)
    named = []
    for _ in range(flips):
        shutil.rmtree(copy)
        shutil.copytree(directory, copy)
        place, bit = chance.randrange(size), chance.randrange(8)
        content = bytearray((copy / file).read_bytes())
        content[place] ^= 1 << bit
        (copy / file).write_bytes(content)
        try:
            found = served(copy)
        except (ConfigError, StorageFailed) as error:
            named.append((error.value, error.remedy is not None))
        else:
            assert found == expected, f"bit {bit} of byte {place} changed what is served"
    assert set(named) == {(str(copy / file), True)}, "the file is named, with a remedy"
