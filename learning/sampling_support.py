"""Restricts the trainer's logits to the tokens that truncated sampling and a minimum length
allowed.

Under top-p sampling a token was drawn from the softmax over a few tokens only. The trainer has to
score it under the same distribution, or the ratio between the two policies would not be 1 on the
policy's own samples:

    logits       2.0   1.0   0.5   −1.0
    kept                x     x             (`Support.only`)
    restricted  −1e30  1.0   0.5   −1e30    log p(second) = 1.0 − log(e^1.0 + e^0.5) = −0.47
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.wire.schemas import Completion, Group, Int32

# A logit with probability 0; unlike infinity, it cannot turn a sum into NaN.
_NOTHING = -1e30
_Array = NDArray[np.int64]
_NO_TOKENS: Int32 = np.zeros(0, np.int32)


class Sampled(NamedTuple):
    """The tokens from which one completion of L tokens was sampled."""

    kept_tokens: Int32
    """[sum of kept_counts] the tokens that truncated sampling (top-p, top-k, min-p) left, one list
    after the other."""
    kept_counts: Int32
    """[L] the length of each token's list, 0 for a token sampled from all; empty if all were."""
    barred: Int32
    """Tokens excluded while sampling the first `min_new_tokens` tokens."""
    min_new_tokens: int

    @classmethod
    def of(cls, group: Group, completion: Completion) -> "Sampled | None":
        """Returns the tokens from which a completion of a group was sampled; None for the whole
        vocabulary.
        """
        if len(completion.kept_counts) or (group.min_new_tokens and len(group.barred)):
            return cls(
                completion.kept_tokens, completion.kept_counts, group.barred, group.min_new_tokens
            )
        return None

    def lists(self, length: int) -> "tuple[_Array, _Array, NDArray[np.bool_]]":
        """Returns, for tokens 0..length-1, the list sizes, the lists, and whether each lists the
        allowed tokens.
        """
        counts = np.zeros(length, np.int64)
        if len(self.kept_counts):
            counts = self.kept_counts.astype(np.int64)
        only = counts > 0
        is_barred = ~only & (np.arange(length) < self.min_new_tokens)
        if not is_barred.any():
            return counts, self.kept_tokens.astype(np.int64), only

        lists = np.split(self.kept_tokens, np.cumsum(counts)[:-1])
        for i in np.flatnonzero(is_barred).tolist():
            lists[i] = self.barred
        sizes = np.where(is_barred, len(self.barred), counts)
        return sizes, np.concatenate(lists).astype(np.int64), only


@dataclass(slots=True)
class Support:
    """The tokens from which each of C completion tokens was sampled.

    `rows` and `tokens` [K] are pairs, sorted by row, and `ends` [C + 1] is the number of pairs
    before each row. A row in `only` was sampled from the tokens of its pairs, any other row from
    all tokens except these.
    """

    rows: Tensor
    tokens: Tensor
    only: Tensor
    """[C], bool"""
    ends: list[int]

    @classmethod
    def of(cls, rows: Sequence[Sampled | None], lengths: Sequence[int]) -> "Support | None":
        """Returns the support of completions of `lengths`; None if all were sampled from the whole
        vocabulary.
        """
        if not any(rows):
            return None
        nothing_listed = Sampled(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, min_new_tokens=0)
        counts: list[_Array] = []
        tokens: list[_Array] = []
        only: list[NDArray[np.bool_]] = []
        for row, length in zip(rows, lengths, strict=True):
            row_counts, row_tokens, row_only = (row or nothing_listed).lists(length)
            counts.append(row_counts)
            tokens.append(row_tokens)
            only.append(row_only)

        sizes: _Array = np.concatenate(counts)
        return cls(
            rows=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)),
            tokens=torch.from_numpy(np.concatenate(tokens)),
            only=torch.from_numpy(np.concatenate(only)),
            ends=[0, *np.cumsum(sizes).tolist()],
        )

    def only_for(self, chosen: _Array) -> "Support":
        """Returns the support of some of the tokens, `chosen` by their indices."""
        ends = np.array(self.ends)
        counts = np.diff(ends)[chosen]
        new_ends = np.cumsum(counts)
        # The pairs of the chosen tokens, which are consecutive for each.
        shift = ends[chosen] - (new_ends - counts)
        pairs = np.arange(counts.sum()) + np.repeat(shift, counts)
        device = self.tokens.device
        return Support(
            rows=torch.from_numpy(np.repeat(np.arange(len(chosen)), counts)).to(device),
            tokens=self.tokens[torch.from_numpy(pairs).to(device)],
            only=self.only[torch.from_numpy(chosen).to(device)],
            ends=[0, *new_ends.tolist()],
        )

    def apply(self, logits: Tensor, first: int) -> Tensor:
        """Lowers, in place, the logits [N, V] of tokens that rows `first` and up could not
        sample.
        """
        pairs = slice(self.ends[first], self.ends[first + len(logits)])
        rows = self.rows[pairs] - first
        tokens = self.tokens[pairs]
        only = self.only[first : first + len(logits)]
        inside = only[rows]
        values = torch.where(inside, logits[rows, tokens], _NOTHING)
        logits.masked_fill_(only[:, None], _NOTHING)
        logits[rows, tokens] = values
        return logits
