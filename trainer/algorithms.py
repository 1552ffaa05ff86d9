"""An algorithm is a row in a table: how it weighs a batch and what it needs. Everything else is shared."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from common.config import AlgorithmSection
from trainer.advantages import group_normalised


@dataclass(frozen=True)
class Algorithm:
    """One row."""

    name: str
    weigh: Callable[[Tensor, AlgorithmSection], Tensor]
    """Advantages [groups, n] from rewards [groups, n]."""


ALGORITHMS = {
    "grpo": Algorithm("grpo", lambda rewards, config: group_normalised(rewards, config.advantage_eps)),
}
