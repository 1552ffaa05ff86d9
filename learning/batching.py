"""How a batch is cut: into mini-batches, shares of the ranks and micro-batches.

Pure functions over lengths and indices, so that every rank cuts the same batch the same way without talking.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.schemas import Float32, Int32
from learning.ranks import Ranks

Indices = NDArray[np.int64]

_QUADRATIC = 24_576
"""Tokens of a row at which attention costs as much as all else: 12 × hidden size, here of 2048."""


@dataclass(slots=True)
class Sizes:
    """Of the rows of a batch, as far as cutting looks at them."""

    prompts: Indices
    """[rows] tokens."""
    completions: Indices
    """[rows] tokens."""
    groups: Indices
    """[rows] the same number for the same prompt."""
    shared: bool
    """Whether a prompt that rows of one part share is computed once and nothing is padded; else rows are padded."""

    @classmethod
    def of(cls, prompts: Sequence[Int32], completions: Sequence[Int32], shared: bool) -> "Sizes":
        """Of rows of [P] and [L] token ids."""
        known: dict[bytes, int] = {}
        groups = [known.setdefault(prompt.tobytes(), len(known)) for prompt in prompts]
        sizes, lengths = ([len(tokens) for tokens in column] for column in (prompts, completions))
        return cls(np.array(sizes, np.int64), np.array(lengths, np.int64), np.array(groups, np.int64), shared)

    @property
    def totals(self) -> Indices:
        """[rows] tokens that are computed of prompt and completion."""
        return self.prompts + self.computed

    @property
    def computed(self) -> Indices:
        """[rows] tokens of the completions without the last, which predicts nothing."""
        computed: Indices = np.maximum(self.completions - 1, 0)
        return computed

    def order(self, indices: Indices) -> Indices:
        """`indices` such that neighbours go well together: by prompt if that is shared, else shortest first."""
        return indices[np.argsort((self.groups if self.shared else self.totals)[indices], kind="stable")]

    def tokens(self, indices: Sequence[int]) -> int:
        """What is computed for these rows together: with prompts once, or with padding."""
        if not len(indices):
            return 0
        if not self.shared:
            return int(self.totals[indices].max()) * len(indices)
        _, one_each = np.unique(self.groups[indices], return_index=True)
        return int(self.computed[indices].sum() + self.prompts[indices][one_each].sum())

    def costs(self, indices: Indices) -> NDArray[np.float64]:
        """[len(indices)] what each of these rows, in `order`, adds: tokens, and attention in the same unit."""
        totals = self.totals[indices].astype(np.float64)
        costs = totals + totals**2 / _QUADRATIC
        if self.shared:
            prompts, groups = self.prompts[indices].astype(np.float64), self.groups[indices]
            repeats = np.concatenate([[False], groups[1:] == groups[:-1]])
            costs -= repeats * (prompts + prompts**2 / _QUADRATIC)
        return costs


def mini_batches(count: int, parts: int, seed: int) -> list[Indices]:
    """`count` rows in random order, cut into `parts` nearly equal parts; in one part they keep their order."""
    order = np.arange(count) if parts == 1 else np.random.default_rng(seed).permutation(count)
    return [part for part in np.array_split(order, parts) if len(part)]


def shares(sizes: Sizes, indices: Indices, world_size: int) -> list[Indices]:
    """Every rank's part of `indices`, of nearly the same cost: none is more than twice the costliest row above the mean.

    Rows that share a prompt stay together, except for those at a border between two ranks: there both compute the prompt.
    """
    order = sizes.order(indices)
    if not sizes.shared:
        return [order[rank::world_size] for rank in range(world_size)]
    costs = sizes.costs(order)
    middles = np.cumsum(costs) - costs / 2
    ranks = np.minimum(middles * world_size // max(costs.sum(), 1.0), world_size - 1)
    return [order[ranks == rank] for rank in range(world_size)]


def micro_batches(sizes: Sizes, indices: Indices, ranks: Ranks, max_tokens: int, max_rows: int | None = None) -> list[Indices]:
    """This rank's share of `indices` in parts for one pass each; every rank has equally many, so some may be empty.

    A part computes at most `max_tokens` tokens (or is one row) and has at most `max_rows` rows, where that is given. There are
    as few parts as that permits, and they are as even as that number permits.
    """
    parts = shares(sizes, indices, ranks.world_size)
    count = max(len(_filled(sizes, part, max_tokens, max_rows)) for part in parts)
    low, high, mine = 0, max_tokens, parts[ranks.rank]
    while low + 1 < high and count > 1:  # the lowest budget that needs no more parts
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, mine, middle, max_rows)) <= count else (middle, high)
    cuts = _filled(sizes, mine, high, max_rows)
    return [np.array(cut, np.int64) for cut in (*cuts, *([[]] * (count - len(cuts))))]


def _filled(sizes: Sizes, indices: Indices, max_tokens: int, max_rows: int | None) -> list[list[int]]:
    """`indices`, which are in `order`, cut into parts, each as full as the bounds permit."""
    prompts, completions, groups = sizes.prompts.tolist(), sizes.computed.tolist(), sizes.groups.tolist()
    cuts: list[list[int]] = []
    tokens = 0
    for index in indices.tolist():
        total = prompts[index] + completions[index]
        if not cuts:
            grown = total
        elif not sizes.shared:
            grown = total * (len(cuts[-1]) + 1)  # the newest is the longest of its part
        else:
            grown = tokens + (completions[index] if groups[cuts[-1][-1]] == groups[index] else total)
        if not cuts or grown > max_tokens or len(cuts[-1]) == max_rows:
            cuts.append([])
            grown = total
        cuts[-1].append(index)
        tokens = grown
    return cuts


def split(flat: Float32, lengths: Sequence[int]) -> list[Float32]:
    """[sum of lengths] as one array for each row."""
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def score_shared(
    sizes: Sizes, ranks: Ranks, max_tokens: int, score: Callable[[Indices], Tensor], max_rows: int | None = None
) -> list[Float32]:
    """One number for every completion token of every row, the same on every rank, each rank computing a part.

    Args:
        sizes: of the rows.
        max_tokens: of one call of `score`, as the layout computes them.
        score: [C] numbers of the completion tokens of the rows at some indices, row by row. Where models are spread over the
            ranks all ranks call it equally often, one without rows of its own with the first row.
        max_rows: rows of one call of `score`; None for no limit but `max_tokens`.
    """
    lengths = sizes.completions.tolist()
    parts = micro_batches(sizes, np.arange(len(lengths)), ranks, max_tokens, max_rows)
    scored = [(part, score(part if len(part) else np.zeros(1, np.int64))) for part in parts if len(part) or ranks.sharded]
    return by_row([(part, numbers) for part, numbers in scored if len(part)], lengths, ranks)


def by_row(scored: Sequence[tuple[Indices, Tensor]], lengths: Sequence[int], ranks: Ranks) -> list[Float32]:
    """[L] for every row, the same on every rank: `scored` has, of some rows, the numbers that this rank computed.

    What no rank has is 0. Every rank calls it.
    """
    flat, ends = torch.zeros(sum(lengths)), np.cumsum(lengths)
    for indices, numbers in scored:
        places = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in indices.tolist()])
        flat[torch.from_numpy(places)] = numbers.float().cpu()
    return split(ranks.sum(flat).numpy(), lengths)
