"""The checksum that SGLang computes of a tensor on a GPU.

Every 32-bit word is mixed with its position (the finaliser of MurmurHash3). The sums over 8,192
words, a tile, are mixed again and added up:

    words  ──►  mixed with their positions  ──►  two sums per tile  ──►  16 hex digits
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


def gpu_digest(*tensors: Tensor) -> str:
    """Returns the checksum that SGLang's `/weights_checker` reports for a tensor on a GPU, as 16
    hex digits.

    Several tensors are treated as concatenated. Computes on a GPU if there is one.
    """
    # Where a word begins in one tensor and ends in the next, they are put together.
    if any(tensor.nbytes % 4 for tensor in tensors[:-1]):
        tensors = (torch.cat([tensor.reshape(-1) for tensor in tensors]),)
    size = -(-sum(tensor.nbytes for tensor in tensors) // 4)
    if not size:
        return "0" * 16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sums = torch.zeros(2, -(-size // _TILE), dtype=torch.int32, device=device)
    first = 0
    for tensor in tensors:
        for chunk in _words(tensor).split(_CHUNK):
            _add(sums, first, chunk.to(device))
            first += len(chunk)
    high, low = _mix(sums ^ _signed(4 * size)).to(torch.int64)
    total = int(((high << 32) | (low & _BITS)).sum()) & ((1 << 64) - 1)
    return f"{_split_mix(total):016x}"


def _add(sums: Tensor, first: int, words: Tensor) -> None:
    """Adds consecutive words, of which the first is the word `first` of the whole, to the sums
    [2, tiles].
    """
    places = torch.arange(len(words), dtype=torch.int32, device=words.device).add_(_signed(first))
    before = first % _TILE
    after = -(before + len(words)) % _TILE
    tile = first // _TILE
    for lane, (factor, seed, turn) in zip(sums, _LANES, strict=True):
        turned = (places << turn) | _shifted(places, 32 - turn)
        mixed = _mix(words ^ (places * factor + seed) ^ turned)
        tiles = pad(mixed, (before, after)).view(-1, _TILE).sum(1, dtype=torch.int32)
        lane[tile : tile + len(tiles)] += tiles


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
    """Shifts right and fills with zeros; int32's own shift would repeat the sign."""
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
