"""Parks tensors in host memory while another process, or another part of this one, needs their
device.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from learning.optimizer import Optimizer
from learning.sharding import local

Resident = tuple[Sequence[nn.Module], Sequence[Optimizer]]
"""The models and optimisers that one part of a run keeps on the GPU."""


class Parking:
    """Moves the storage of tensors on `device` to host memory and back.

    The tensors stay the same objects, as do their views and shares, such as those that FSDP2 keeps.
    They must not be used while parked. The host memory (pinned for a GPU) is kept for the next
    time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Storages, each with its bytes in host memory.
        self._parked: list[tuple[UntypedStorage, Tensor]] = []
        # Host memory of earlier times, by its size in bytes.
        self._free: dict[int, list[Tensor]] = {}

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copies the tensors' storages to host memory and frees them; storages elsewhere or of
        fixed size stay.
        """
        pinned = self._device.type == "cuda"
        for storage in storages(tensors, self._device):
            free = self._free.setdefault(storage.nbytes(), [])
            if not free:
                free.append(torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned))
            here = free.pop()
            here.copy_(self._bytes(storage), non_blocking=True)
            self._parked.append((storage, here))
        self._wait()
        for storage, _ in self._parked:
            storage.resize_(0)
        if pinned:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Copies the parked storages back to the device."""
        for storage, here in self._parked:
            storage.resize_(len(here))
            self._bytes(storage).copy_(here, non_blocking=True)
            self._free[len(here)].append(here)
        self._wait()
        self._parked = []

    def _bytes(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

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
