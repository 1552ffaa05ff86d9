"""Encodes a file as its difference to another of equal size: few 16-bit words of new weights differ
from the last ones.

A delta is a sequence of blocks, one for each `_WORDS` words of the file: a header (number of
entries, bytes of the payload), then the deflated payload: for every entry its gap to the previous
one (one byte), then for every entry the difference of the words (two bytes). Entries of difference
0 bridge gaps that do not fit in a byte.

    words before   5 5 5 5 5 5 5 5
    words after    5 5 6 5 5 5 5 4
    gaps           2, 4           (unchanged words before each entry)
    differences    1, -1          (modulo 65,536)

Deltas are not trusted: whoever applies one must compare the checksum of the whole result.
`trainer.weights.versions` writes them, `services.rollout.weights.store` applies them.
"""

import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.weights import recycled_files
from common.weights.checksums import Hasher

_WORDS = 1 << 20
_HEADER = struct.Struct("<II")
_LARGEST = 4
"""A delta is removed when it is larger than the file divided by this number."""
_PLACES = 16
"""Places that are compared before a delta is started."""
_LOOK = 1 << 16
"""Bytes compared at a place."""
_GAP = 256
"""The gap of a bridge: one more than the largest that fits in a byte."""


class BadDelta(ValueError):
    """The bytes are not a delta of this file."""


def write_delta(old: Path, new: Path, target: Path) -> int | None:
    """Writes the delta from `old` to `new`. Returns its size in bytes; None, without a file, when
    it is too large.
    """
    size = new.stat().st_size
    if old.stat().st_size != size or _is_dense(old, new, size):
        return None
    with old.open("rb") as before, new.open("rb") as after, target.open("xb") as stream:
        for _ in range(0, size, 2 * _WORDS):
            stream.write(_encode(_words(before), _words(after)))
    written = target.stat().st_size
    if written * _LARGEST <= size:
        return written
    target.unlink()
    return None


def _is_dense(old: Path, new: Path, size: int) -> bool:
    """Whether too many bytes differ for a delta, judged by sampling a few places."""
    if size == 0:
        return False
    before = np.memmap(old, np.uint8, "r")
    after = np.memmap(new, np.uint8, "r")
    starts = range(0, size, max(_LOOK, size // _PLACES))
    places = [slice(start, start + _LOOK) for start in starts]
    shares = [np.mean(before[place] != after[place]) for place in places]
    return float(np.mean(shares)) * _LARGEST > 1


def apply_delta(old: Path, delta: Path, target: Path) -> str:
    """Applies `delta` to `old` and writes the result to `target`, which must not exist; returns its
    checksum.

    Raises BadDelta when `delta` is damaged.
    """
    left = old.stat().st_size
    digest = Hasher()
    with (
        old.open("rb") as before,
        delta.open("rb") as changes,
        recycled_files.create(target, left) as stream,
    ):
        while left > 0:
            words = _words(before)
            _patch(words, changes)
            content = words.view(np.uint8).data[: min(left, words.nbytes)]
            digest.update(content)
            stream.write(content)
            left -= len(content)
    return digest.hexdigest()


def _words(stream: BinaryIO) -> NDArray[np.uint16]:
    """Reads the next words of a file; a last odd byte is padded with a zero."""
    found = np.fromfile(stream, np.uint8, 2 * _WORDS)
    if len(found) % 2:
        found = np.append(found, np.uint8(0))
    return found.view("<u2")


def _encode(was: NDArray[np.uint16], now: NDArray[np.uint16]) -> bytes:
    at = np.flatnonzero(was != now)
    gaps = np.diff(at, prepend=-1) - 1
    bridges = gaps // _GAP
    if bridges.any():  # a bridge is an entry 256 words after the previous one
        last = np.cumsum(bridges + 1) - 1
        steps = np.full(int(last[-1]) + 1, _GAP - 1)
        steps[last] = gaps % _GAP
        changes = np.zeros(len(steps), np.uint16)
        changes[last] = now[at] - was[at]
    else:
        steps = gaps
        changes = now[at] - was[at]
    # Differences are mostly 1 or -1; their low and high bytes compress better when stored
    # separately.
    halves = changes.view(np.uint8).reshape(-1, 2).T.tobytes()
    payload = zlib.compress(steps.astype(np.uint8).tobytes() + halves, 1)
    return _HEADER.pack(len(steps), len(payload)) + payload


def _patch(words: NDArray[np.uint16], changes: BinaryIO) -> None:
    """Adds the next block of `changes` to `words`. Raises BadDelta where it cannot; what fits, but
    is damaged, shows in the checksum of the whole.
    """
    try:
        count, size = _HEADER.unpack(changes.read(_HEADER.size))
        count = min(count, len(words))  # a damaged number must not take memory
        packed = changes.read(min(size, 4 * words.nbytes + 64))
        payload = zlib.decompressobj().decompress(packed, 3 * count + 1)
        steps = np.frombuffer(payload, np.uint8, count)
        halves = np.frombuffer(payload, np.uint8, 2 * count, count)
        at = np.cumsum(steps.astype(np.int64) + 1) - 1
        words[at] += halves.reshape(2, -1).T.copy().view("<u2").reshape(-1)
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise BadDelta(str(error)) from None
