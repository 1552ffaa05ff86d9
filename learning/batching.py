"""Splits a batch into mini-batches, shares for the ranks and micro-batches, and goes through these.

The functions that split are pure ones over lengths and indices, so that every rank splits the same
batch the same way without communication. A rank knows the sizes of all rows, and has the tokens of
its own ones. `score_shared` and `micro_batch_passes` go through the micro-batches, on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from common.process import progress
from common.settings.sections import TrainerSection
from common.wire.schemas import Float32, Int32
from learning.ranks import Ranks
from learning.sharding import sum_gradients_after

Indices = NDArray[np.int64]

_QUADRATIC = 24_576
"""Row length in tokens at which attention costs as much as everything else: 12 × the hidden size,
here 2048."""


class Tokens(Protocol):
    """A prompt and its completion."""

    @property
    def prompt_ids(self) -> Int32: ...

    @property
    def completion_ids(self) -> Int32: ...


@dataclass(slots=True)
class Sizes:
    """Lengths and groups of the rows of a batch."""

    prompts: Indices
    """[rows] tokens."""
    completions: Indices
    """[rows] tokens."""
    groups: Indices
    """[rows] number of the row's prompt; equal for equal prompts."""
    shared: bool
    """Whether the rows of one part compute a shared prompt once, without padding; otherwise rows
    are padded."""
    scored: Indices | None = None
    """[rows] tokens of the completions that are scored: those that are not masked; None for all."""
    owners: Indices | None = None
    """[rows] the share that computes the row, whatever it is computed for; None: what is computed
    at once is split evenly."""

    @classmethod
    def of(cls, rows: Sequence[Tokens], shared: bool) -> "Sizes":
        """Measures rows whose completion tokens are all scored."""
        known: dict[bytes, int] = {}
        groups = [known.setdefault(row.prompt_ids.tobytes(), len(known)) for row in rows]
        return cls(
            prompts=np.array([len(row.prompt_ids) for row in rows], np.int64),
            completions=np.array([len(row.completion_ids) for row in rows], np.int64),
            groups=np.array(groups, np.int64),
            shared=shared,
        )

    @property
    def totals(self) -> Indices:
        """[rows] tokens to compute, of prompt and completion."""
        return self.prompts + self.computed

    @property
    def computed(self) -> Indices:
        """[rows] completion tokens to compute: all but the last, which predicts nothing."""
        computed: Indices = np.maximum(self.completions - 1, 0)
        return computed

    def owned(self, share: int) -> Indices:
        """Returns the rows of a share."""
        rows = np.arange(len(self.prompts))
        return rows if self.owners is None else rows[self.owners == share]

    def spare(self, share: int) -> Indices:
        """Returns [1] a row with which a share takes part in a pass of the others: its first, or
        that of the batch if it has none.
        """
        return np.append(self.owned(share), 0)[:1]

    def together(self, indices: Indices) -> int:
        """Returns the tokens of one pass of these rows."""
        if not self.shared:
            return int(self.totals[indices].max(initial=0)) * len(indices)
        _, first_of_group = np.unique(self.groups[indices], return_index=True)
        prompts = self.prompts[indices][first_of_group]
        return int(prompts.sum() + self.computed[indices].sum())

    def order(self, indices: Indices) -> Indices:
        """Sorts `indices` so that neighbours belong together: by prompt if prompts are shared, else
        shortest first.
        """
        keys = self.groups if self.shared else self.totals
        return indices[np.argsort(keys[indices], kind="stable")]

    def costs(self, indices: Indices) -> NDArray[np.float64]:
        """Returns [len(indices)] the cost that each row, in `order`, adds: tokens, plus attention
        in tokens.
        """
        totals = self.totals[indices].astype(np.float64)
        # Everything but attention is linear in the length; attention is quadratic.
        costs = totals + totals**2 / _QUADRATIC
        if self.shared:
            prompts = self.prompts[indices].astype(np.float64)
            groups = self.groups[indices]
            # A row whose neighbour has the same prompt adds only its completion.
            repeats = np.concatenate([[False], groups[1:] == groups[:-1]])
            costs -= repeats * (prompts + prompts**2 / _QUADRATIC)
        return costs


def mini_batches(count: int, parts: int, seed: int) -> list[Indices]:
    """Splits `count` rows in random order into `parts` nearly equal parts; a single part keeps
    their order.
    """
    order = np.arange(count) if parts == 1 else np.random.default_rng(seed).permutation(count)
    return [part for part in np.array_split(order, parts) if len(part)]


def shares(sizes: Sizes, indices: Indices, count: int) -> list[Indices]:
    """Splits `indices` into `count` parts: by the rows' owners, if they have some, else of similar
    cost, above the mean by at most twice the costliest row.

    Rows that share a prompt then stay together, except at the border between two parts, which both
    compute the prompt.
    """
    order = sizes.order(indices)
    if sizes.owners is not None:
        return [order[sizes.owners[order] == part] for part in range(count)]
    if not sizes.shared:
        return [order[part::count] for part in range(count)]
    costs = sizes.costs(order)
    # Each row goes to the part in which the middle of its cost falls, if all costs are laid end to
    # end and the line is cut into `count` equal pieces.
    middles = np.cumsum(costs) - costs / 2
    parts = np.minimum(middles * count // max(costs.sum(), 1.0), count - 1)
    return [order[parts == part] for part in range(count)]


def micro_batches(
    sizes: Sizes, indices: Indices, ranks: Ranks, max_tokens: int, max_rows: int | None = None
) -> list[Indices]:
    """Splits this rank's share of `indices` into micro-batches; all ranks get equally many, so some
    may be empty.

    A micro-batch has at most `max_tokens` computed tokens for each rank that computes it (or a
    single row) and at most `max_rows` rows, if given. Their number is minimal and their sizes are
    as even as possible.
    """
    parts = shares(sizes, indices, ranks.shares)
    # Ranks that compute a row together hold a part of its tokens each.
    max_tokens *= ranks.context_size
    count = max(len(_filled(sizes, part, max_tokens, max_rows=max_rows)) for part in parts)
    own_rows = parts[ranks.share]

    # Find by bisection the lowest budget that needs no more parts: they are then as even as can be.
    too_low = 0
    budget = max_tokens
    while too_low + 1 < budget and count > 1:
        middle = (too_low + budget) // 2
        if len(_filled(sizes, own_rows, middle, max_rows=max_rows)) <= count:
            budget = middle
        else:
            too_low = middle

    filled = _filled(sizes, own_rows, budget, max_rows=max_rows)
    filled += [[] for _ in range(count - len(filled))]
    return [np.array(rows, np.int64) for rows in filled]


def _filled(
    sizes: Sizes, indices: Indices, max_tokens: int, max_rows: int | None
) -> list[list[int]]:
    """Splits `indices`, which are in `order`, into parts that are as full as the bounds permit."""
    prompts = sizes.prompts.tolist()
    completions = sizes.computed.tolist()
    groups = sizes.groups.tolist()
    parts: list[list[int]] = []
    tokens = 0  # computed in the last part
    for index in indices.tolist():
        total = prompts[index] + completions[index]
        if not parts:
            grown = total
        elif not sizes.shared:
            grown = total * (len(parts[-1]) + 1)  # the newest is the longest of its part
        elif groups[parts[-1][-1]] == groups[index]:
            grown = tokens + completions[index]
        else:
            grown = tokens + total

        # The first row of a part may be longer than the bound: a row cannot be cut.
        if not parts or grown > max_tokens or len(parts[-1]) == max_rows:
            parts.append([])
            grown = total
        parts[-1].append(index)
        tokens = grown
    return parts


def owners(sizes: Sizes, parts: Sequence[Indices], count: int) -> Indices:
    """Returns [rows] which of `count` shares computes each row, so that every one of `parts`, which
    are computed one after the other, has shares of similar cost.
    """
    found = np.zeros(len(sizes.prompts), np.int64)
    for part in parts:
        for share, rows in enumerate(shares(sizes, part, count)):
            found[rows] = share
    return found


def split(flat: Float32, lengths: Sequence[int]) -> list[Float32]:
    """Splits [sum of lengths] into one array for each row."""
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def score_shared(
    sizes: Sizes,
    ranks: Ranks,
    settings: TrainerSection,
    score: Callable[[Indices], Tensor],
) -> list[Float32]:
    """Returns one number per scored completion token of every row of this rank's share; an empty
    array for a row of another share.

    `score` gets the indices of some rows, with at most `pass_tokens` tokens to compute, and returns
    [C] numbers for their completion tokens, row by row. With sharded models all ranks call it
    equally often; a rank that has no rows left gives it its spare row (`Sizes.spare`).
    """
    lengths = sizes.completions if sizes.scored is None else sizes.scored
    rows = np.arange(len(lengths))
    scored: list[tuple[Indices, Tensor]] = []
    parts = micro_batches(
        sizes,
        rows,
        ranks,
        max_tokens=settings.pass_tokens,
        max_rows=settings.micro_batch_size,
    )
    for part in parts:
        if len(part):
            scored.append((part, score(part)))
        elif ranks.sharded:  # take part in the other ranks' collective calls
            score(sizes.spare(ranks.share))
        progress.moved()
    return by_row(scored, lengths)


def by_row(scored: Sequence[tuple[Indices, Tensor]], lengths: Indices) -> list[Float32]:
    """Returns what was computed for each row; an empty array for a row that was not computed."""
    found: list[Float32] = [np.zeros(0, np.float32)] * len(lengths)
    for indices, numbers in scored:
        own = split(numbers.float().cpu().numpy(), lengths[indices].tolist())
        for index, values in zip(indices.tolist(), own, strict=True):
            found[index] = values
    return found


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
