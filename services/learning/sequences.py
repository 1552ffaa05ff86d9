"""Token sequences as tensors, and how a batch of them is cut: into mini-batches, shares of the ranks and micro-batches.

Pure functions over lengths and indices, so that every rank cuts the same batch the same way without talking.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.schemas import Float32, Int32
from services.learning.ranks import Ranks

Indices = NDArray[np.int64]


@dataclass(slots=True)
class Padded:
    """Right-padded prompts with their completions. C is the number of completion tokens of all rows together."""

    input_ids: Tensor
    """[rows, T]"""
    attention_mask: Tensor
    """[rows, T], 1 on real tokens."""
    predicts: Tensor
    """[rows, T] bool: positions whose next token is a completion token. Selecting by it gives [C], row by row."""

    @classmethod
    def of(cls, prompts: Sequence[Int32], completions: Sequence[Int32]) -> "Padded":
        """Rows of [P] and [L] token ids; prompts are not empty."""
        width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
        input_ids = np.zeros((len(prompts), width), np.int64)
        attention_mask = np.zeros((len(prompts), width), np.int64)
        predicts = np.zeros((len(prompts), width), bool)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            start, end = len(prompt), len(prompt) + len(completion)
            input_ids[i, :start] = prompt
            input_ids[i, start:end] = completion
            attention_mask[i, :end] = 1
            predicts[i, start - 1 : end - 1] = True
        return cls(torch.from_numpy(input_ids), torch.from_numpy(attention_mask), torch.from_numpy(predicts))

    def to(self, device: torch.device) -> "Padded":
        """The same on `device`."""
        return Padded(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))


def mini_batches(count: int, parts: int, seed: int) -> list[Indices]:
    """`count` rows in random order, cut into `parts` nearly equal parts; in one part they keep their order."""
    order = np.arange(count) if parts == 1 else np.random.default_rng(seed).permutation(count)
    return [part for part in np.array_split(order, parts) if len(part)]


def share(lengths: Sequence[int], indices: Indices, rank: int, world_size: int) -> Indices:
    """This rank's part of `indices`, balanced by length and shortest first; all ranks' parts together are `indices`."""
    by_length = indices[np.argsort(np.asarray(lengths)[indices], kind="stable")]
    return by_length[rank::world_size]


def micro_batches(lengths: Sequence[int], indices: Indices, max_tokens: int, max_rows: int | None = None) -> list[Indices]:
    """Cuts `indices`, shortest first, so that each part padded has at most `max_tokens` tokens (or is one row).

    No part has more than `max_rows` rows, where that is given.
    """
    cuts: list[list[int]] = []
    for index in indices.tolist():  # the newest is the longest of its part
        if not cuts or lengths[index] * (len(cuts[-1]) + 1) > max_tokens or len(cuts[-1]) == max_rows:
            cuts.append([])
        cuts[-1].append(index)
    return [np.array(cut, np.int64) for cut in cuts]


def split(flat: Float32, lengths: Sequence[int]) -> list[Float32]:
    """[sum of lengths] as one array for each row."""
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def score_shared(
    totals: Sequence[int],
    lengths: Sequence[int],
    ranks: Ranks,
    max_tokens: int,
    score: Callable[[Indices], Tensor],
    max_rows: int | None = None,
) -> list[Float32]:
    """One number for every completion token of every row, the same on every rank, each rank computing a part.

    Args:
        totals, lengths: tokens of each row, and those of them that are its completion's.
        max_tokens: of one call of `score`, padding included.
        score: [C] numbers of the completion tokens of the rows at some indices, row by row.
        max_rows: rows of one call of `score`; None for no limit but `max_tokens`.
    """
    flat, ends = torch.zeros(sum(lengths)), np.cumsum(lengths)
    mine = share(totals, np.arange(len(totals)), ranks.rank, ranks.world_size)
    for indices in micro_batches(totals, mine, max_tokens, max_rows):
        parts = score(indices).float().cpu().split([lengths[i] for i in indices.tolist()])
        for i, part in zip(indices.tolist(), parts, strict=True):
            flat[ends[i] - lengths[i] : ends[i]] = part
    return split(ranks.sum(flat).numpy(), lengths)
