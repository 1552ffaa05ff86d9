"""Turns on the GPUs that the trainer shares with the engines (`rollout.colocate`).

    the engines generate            the trainer's models and optimisers are parked in host memory
    the trainer updates             the engines sleep: paused, their memory released
    weights are published           copied to host memory, then the trainer parks; engines wake up with them

A turn begins only when the other side has said that its memory is free.
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
"""What a part of the run keeps on the GPU."""


@runtime_checkable
class Sleepers(Protocol):
    """The engines, as rank 0 reaches them."""

    def sleep(self) -> None:
        """Returns when no engine holds memory. Raises ServiceError when one keeps it."""

    def wake(self) -> None:
        """Returns when the engines generate again, with the weights that they had."""


class Turns:
    """The turns of a trainer that shares nothing, and the base of the others."""

    shared = False
    """Whether the GPUs are shared."""

    def take(self) -> None:
        """Puts the engines to sleep and brings the trainer's states back, unless they are here. A collective."""

    def give(self) -> None:
        """Parks the trainer's states, on every rank, before the engines are told to wake up. A collective."""

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Takes the turn for what is inside, and gives it back if it was the engines'. A collective."""
        yield


class SharedTurns(Turns):
    """The turns with `rollout.colocate`. `resident` tells what to park."""

    shared = True

    def __init__(self, ranks: Ranks, resident: Callable[[], Sequence[Resident]]) -> None:
        self._ranks, self._resident, self._parking = ranks, resident, Parking(ranks.device)
        self._given = False
        self.engines: Sleepers | None = None
        """Rank 0's."""

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
        optimizer.zero_grad()  # the next update begins with that anyway
    for module in modules:
        reshard(module)
        yield from module.parameters()
        yield from module.buffers()
    for optimizer in optimizers:
        yield from optimizer.state_dict().values()
