"""Turns on the GPUs that the trainer shares with the engines (`rollout.colocate`).

    the engines generate            the trainer's models and optimisers are parked in host memory
    the trainer updates             the engines sleep: paused, their memory released weights are
    published           copied to host memory, then the trainer parks; engines wake up with them

A turn begins only once the other side has reported that its memory is free.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from learning.optimizer import Optimizer
from learning.parking import Parking
from learning.ranks import Ranks
from learning.sharding import reshard

Resident = tuple[Sequence[nn.Module], Sequence[Optimizer]]
"""The models and optimizers that one part of the run keeps on the GPU."""


@runtime_checkable
class Sleepers(Protocol):
    """The engines, as rank 0 controls them."""

    def sleep(self) -> None:
        """Returns when no engine holds GPU memory. Raises ServiceError when one does not release
        it.
        """

    def wake(self) -> None:
        """Returns when the engines generate again, with the newest weights published."""


class Turns:
    """Base class, for a trainer that shares no GPU: every method does nothing."""

    shared = False
    """Whether the GPUs are shared."""

    def take(self) -> None:
        """Puts the engines to sleep and restores the trainer's states, unless it has done so. A
        collective call.
        """

    def give(self) -> None:
        """Parks the trainer's states, on every rank, before the engines wake up. A collective
        call.
        """

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Takes the turn for the block, and gives it back if it was the engines' before. A
        collective call.
        """
        yield


class SharedTurns(Turns):
    """The turns with `rollout.colocate`. `resident` returns what to park."""

    shared = True

    def __init__(self, ranks: Ranks, resident: Callable[[], Sequence[Resident]]) -> None:
        self._ranks, self._resident, self._parking = ranks, resident, Parking(ranks.device)
        self._given = False
        self.engines: Sleepers | None = None
        """Set on rank 0 only."""

    def take(self) -> None:
        if self._given:
            if self.engines is not None:
                self.engines.sleep()
            self._ranks.barrier()
            self._parking.restore()
            self._given = False

    def give(self) -> None:
        self._parking.park(chain.from_iterable(_tensors(*part) for part in self._resident()))
        self._ranks.barrier()
        self._given = True

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        theirs = self._given
        self.take()
        yield
        if theirs:
            self.give()
            if self.engines is not None:
                self.engines.wake()


def _tensors(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        optimizer.zero_grad()  # the next update starts with this anyway
    for module in modules:
        reshard(module)
        yield from module.parameters()
        yield from module.buffers()
    for optimizer in optimizers:
        yield from optimizer.state_dict().values()
