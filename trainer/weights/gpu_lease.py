"""The lease of the GPUs that the trainer shares with the engines (`rollout.colocate`).

| who holds it | trainer | engines |
|---|---|---|
| the engines, which generate | models and optimisers are parked in host memory | in use |
| the trainer, which updates | in use | asleep: paused, their memory released |

To publish, the trainer copies the weights to host memory and then parks; the engines wake up with
them. Either side begins only once the other has reported that its memory is free.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from learning.parking import Parking, Resident
from learning.ranks import Ranks
from learning.sharding import reshard
from trainer.timing import StageClock


class EngineMemory(Protocol):
    """The GPU memory of the engines, as rank 0 controls it."""

    def sleep(self) -> None:
        """Returns when no engine holds GPU memory. Raises ServiceError when one does not release
        it.
        """

    def wake(self) -> None:
        """Returns when the engines generate again, with the newest weights published."""


class GpuLease:
    """The lease, on every rank; without `rollout.colocate` the trainer holds it all the time.

    Args:
        ranks: the trainer's ranks.
        resident: returns what to park.
        engines: the memory of the engines; None on ranks above 0.
        shared: whether the trainer shares its GPUs with the engines.
    """

    def __init__(
        self,
        ranks: Ranks,
        resident: Callable[[], Sequence[Resident]],
        engines: EngineMemory | None = None,
        *,
        shared: bool = True,
    ) -> None:
        self.shared = shared
        self._ranks = ranks
        self._resident = resident
        self._engines = engines
        self._parking = Parking(ranks.device)
        self._released = False

    @contextmanager
    def training(self, clock: StageClock) -> Iterator[None]:
        """Holds the lease inside the block, at whose end the weights to publish are in host memory.
        The engines wake up with them. A collective call.
        """
        with clock.stage("update"):
            self.acquire()
        yield
        with clock.stage("publish"):
            self.release()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Holds the lease inside the block, and gives it back to the engines if they had it before;
        their weights are the same. A collective call.
        """
        was_released = self._released
        self.acquire()
        yield
        if was_released:
            self.release()
            if self._engines is not None:
                self._engines.wake()

    def acquire(self) -> None:
        """Puts the engines to sleep and restores the trainer's states, unless it holds the lease
        already. A collective call.
        """
        if not self._released:
            return
        if self._engines is not None:
            self._engines.sleep()
        self._ranks.barrier()
        self._parking.restore()
        self._released = False

    def release(self) -> None:
        """Parks the trainer's states, on every rank, before the engines wake up. A collective
        call.
        """
        if not self.shared:
            return
        self._parking.park(_tensors(self._resident()))
        self._ranks.barrier()
        self._released = True


def _tensors(resident: Sequence[Resident]) -> Iterator[Tensor]:
    """Yields the tensors to park: parameters, buffers and optimiser states."""
    for modules, optimizers in resident:
        for optimizer in optimizers:
            optimizer.zero_grad()  # the next update starts with this anyway

        for module in modules:
            reshard(module)
            yield from module.parameters()
            yield from module.buffers()

        for optimizer in optimizers:
            yield from optimizer.state_dict().values()
