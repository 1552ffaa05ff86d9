"""The checksum that SGLang computes of a tensor on a GPU, from parts that need not be there at the
same time.

Every 32-bit word is mixed with its position (the finaliser of MurmurHash3). The sums over 8,192
words, a tile, are mixed again and added up:

    parts, as they come  ──►  words mixed with their positions  ──►  two sums per tile  ──►  16 hex
    digits

What stays of a part are the sums: 8 bytes for 32,768.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_TILE = 8192
"""Words per tile."""
_CHUNK = 512 * _TILE
"""Words that are mixed at a time, for which temporary memory of a few times 16 MiB is needed."""
_BITS = 0xFFFFFFFF
_SEED = 0x243F6A88


def _signed(word: int) -> int:
    """Returns the int32 with the bits of `word`. torch multiplies int32, with the same result as
    for unsigned words.
    """
    word &= _BITS
    return word - (1 << 32) if word >> 31 else word


_MIX = (_signed(0x85EBCA6B), _signed(0xC2B2AE35))
_LANES = (
    (_signed(0x27D4EB2D), _signed(_SEED), 15),
    (_signed(0x165667B1), _signed(_SEED * 0x9E3779B1 ^ 0xDEADBEEF), 13),
)
"""Factor, seed and rotation by which the position of a word enters each half of the checksum."""


class TensorHash:
    """The checksum of `size` bytes, computed on `device`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._words = -(-size // 4)
        self._sums = torch.zeros(2, -(-self._words // _TILE), dtype=torch.int32, device=device)
        self._missing = size
        self._total = torch.zeros((), dtype=torch.int64)
        self._done = torch.get_device_module(device).Event()

    @property
    def complete(self) -> bool:
        """Whether all bytes were added."""
        return self._missing == 0

    def add(self, start: int, part: Tensor) -> None:
        """Adds a tensor whose first byte is the byte `start` of the whole.

        `start` is a multiple of 4, and so is the size of every part but the last.
        """
        words = _words(part)
        first = start // 4
        for place in range(0, len(words), _CHUNK):
            self._add_words(first + place, words[place : place + _CHUNK].to(self._sums.device))
        self._missing -= part.nbytes
        if part.nbytes and self.complete:
            self._finish()

    def hexdigest(self) -> str:
        """Returns the checksum of all bytes as 16 hex digits; may be called while another stream
        computes it.
        """
        assert self.complete, f"{self._missing} bytes are missing"
        self._done.synchronize()
        total = int(self._total) & ((1 << 64) - 1)
        return f"{_split_mix(total):016x}" if self._words else "0" * 16

    def _add_words(self, first: int, words: Tensor) -> None:
        places = torch.arange(len(words), dtype=torch.int32, device=words.device).add_(
            _signed(first)
        )
        before = first % _TILE
        after = -(before + len(words)) % _TILE
        tile = first // _TILE
        for sums, (factor, seed, turn) in zip(self._sums, _LANES, strict=True):
            turned = (places << turn) | _shifted(places, 32 - turn)
            mixed = _mix(words ^ (places * factor + seed) ^ turned)
            tiles = pad(mixed, (before, after)).view(-1, _TILE).sum(1, dtype=torch.int32)
            sums[tile : tile + len(tiles)] += tiles

    def _finish(self) -> None:
        high, low = _mix(self._sums ^ _signed(4 * self._words)).to(torch.int64)
        # To the host now: whoever asks may not share this stream, and its own may be busy with an
        # update.
        self._total = ((high << 32) | (low & _BITS)).sum().to("cpu", non_blocking=True)
        self._done.record()
        del self._sums


def gpu_digest(*tensors: Tensor) -> str:
    """Returns the checksum that SGLang's `/weights_checker` reports for a tensor on a GPU, as 16
    hex digits.

    Several tensors are treated as concatenated. Computes on a GPU if there is one.
    """
    if any(tensor.nbytes % 4 for tensor in tensors[:-1]):
        tensors = (torch.cat([tensor.reshape(-1) for tensor in tensors]),)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = TensorHash(sum(tensor.nbytes for tensor in tensors), device)
    start = 0
    for tensor in tensors:
        found.add(start, tensor)
        start += tensor.nbytes
    return found.hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as int32 [words], the last one filled up with zeros; copies
    only what it must.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % 4:
        flat = pad(flat, (0, -len(flat) % 4))
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifts right, filling up with zeros, where int32 repeats its sign."""
    return (words >> bits) & ((1 << (32 - bits)) - 1)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 16)) * _MIX[0]
    words = (words ^ _shifted(words, 13)) * _MIX[1]
    return words ^ _shifted(words, 16)


def _split_mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
