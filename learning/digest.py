"""Checksums of tensors that are in memory, on one or many ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from common.weights.checksums import Hasher
from learning.ranks import Ranks
from learning.sharding import local


def digest(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> str:
    """Returns the checksum of names and contents as 32 hex digits, the same on every rank. A
    collective.

    Of sharded tensors every rank reads its own share, so that the checksum holds for one number of
    ranks. Ranks that hold a copy each read the same, and the checksum is that of one process.
    """
    hasher = Hasher()
    for name, tensor in tensors:
        hasher.update(name.encode())
        share = local(tensor).contiguous().reshape(-1)
        hasher.update(memoryview(share.cpu().view(torch.uint8).numpy()))
    own = hasher.hexdigest()

    every = ranks.gather(own)
    if not ranks.sharded and len(set(every)) == 1:
        return own
    return Hasher("".join(every).encode()).hexdigest()
