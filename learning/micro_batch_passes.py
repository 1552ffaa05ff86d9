"""The forward and backward passes of one update, on every rank."""

from collections.abc import Iterator

from torch import nn

from common.process import progress
from common.settings.sections import TrainerSection
from learning.batching import Indices, Sizes, micro_batches
from learning.ranks import Ranks
from learning.sharding import sum_gradients_after


def micro_batch_passes(
    model: nn.Module,
    ranks: Ranks,
    sizes: Sizes,
    rows: Indices,
    settings: TrainerSection,
) -> Iterator[tuple[Indices, bool]]:
    """Yields the rows of each pass of this rank, and whether they are its own; the caller computes
    their gradient before the next.

    Sharded models need equally many passes on every rank. A rank that has run out of its own rows
    gets its spare one, whose loss it multiplies by 0.
    """
    parts = micro_batches(
        sizes,
        rows,
        ranks,
        max_tokens=settings.pass_tokens,
        max_rows=settings.micro_batch_size,
    )
    for number, indices in enumerate(parts, 1):
        sum_gradients_after(model, ranks, last=number == len(parts))
        if len(indices):
            yield indices, True
        elif ranks.sharded:
            yield sizes.spare(ranks.share), False
        progress.moved()
