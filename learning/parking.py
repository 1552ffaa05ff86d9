"""Parks tensors in host memory while another process, or another part of this one, needs their
device.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, UntypedStorage, nn

from learning.optimizer import Optimizer
from learning.sharding import local

Resident = tuple[Sequence[nn.Module], Sequence[Optimizer]]
"""The models and optimizers that one part of a run keeps on the GPU."""

_BLOCK_BYTES = 64 << 20
"""Size of the blocks: a power of two, to which pinned memory is rounded, so that nothing is
wasted."""


class Parking:
    """Moves the storage of tensors on `device` to host memory and back.

    The tensors stay the same objects, as do their views and shares, such as those that FSDP2 keeps.
    They must not be used while parked. The host memory (pinned for a GPU) is kept for the next
    time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._blocks = device, list[Tensor]()
        self._parked: list[tuple[UntypedStorage, int]] = []

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copies the tensors' storages to host memory and frees them; storages elsewhere or of
        fixed size stay.
        """
        self._parked = [(storage, storage.nbytes()) for storage in storages(tensors, self._device)]
        for there, here in self._pieces():
            here.copy_(there, non_blocking=True)
        self._wait()
        for storage, _ in self._parked:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Copies the parked storages back to the device."""
        for storage, size in self._parked:
            storage.resize_(size)
        for there, here in self._pieces():
            there.copy_(here, non_blocking=True)
        self._wait()
        self._parked = []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, piece by piece, the bytes of every storage and their place in the blocks."""
        start = 0
        for storage, size in self._parked:
            flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            end = start + size
            cuts = [
                start,
                *range((start // _BLOCK_BYTES + 1) * _BLOCK_BYTES, end, _BLOCK_BYTES),
                end,
            ]
            for first, last in pairwise(cuts):
                index, place = divmod(first, _BLOCK_BYTES)
                yield (
                    flat[first - start : last - start],
                    self._block(index)[place : place + last - first],
                )
            start = end

    def _block(self, index: int) -> Tensor:
        if index == len(self._blocks):
            self._blocks.append(
                torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            )
        return self._blocks[index]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storages(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Returns the resizable storages on `device`, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())
