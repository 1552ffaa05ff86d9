"""Passes of one shape: what the model computes for a token depends on nothing beside it, to the
last bit.

A matrix product rounds by its shape, so that a row has other last digits among 8 rows than among
256. Here tokens, of prompts and of completions alike, are computed in blocks of `ROWS` tokens,
which attend to a number of columns that follows from their position. A block that is not full
repeats its last token. So it does not matter what else is in a batch, in which parts a prompt is
computed, or whether a token was computed before or is computed again.

How many tokens of a block choose an expert depends on all of them, so an expert that one of them
chooses computes the whole block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import ConfigError
from learning.experts import expert_modules
from services.engine.cache import SlotCache
from services.engine.graphs import round_up
from services.engine.sampling import Inputs, sample

ROWS = 64
"""Tokens of a block."""
_COLUMNS_UNIT = 64
_PROBE = 8
"""Tokens of the two sequences with which `check` fills blocks."""
_COUNTS = (1, 2, 4, 8, 16, 32, 63)
"""How often `check` has the first of them."""
_POSITION = 2
"""Row of the positions among tokens [3, N], below the tokens and their rows of the cache."""
Indices = NDArray[np.int64]
Forward = Callable[[Tensor, Tensor, bool], Tensor]
"""(tokens [ROWS], their positions [ROWS], whether logits are needed) -> logits [ROWS, V], or
anything if they are not; in the pass that the cache has begun."""


@dataclass(frozen=True)
class Block:
    """Tokens that are computed together."""

    members: Indices
    """[ROWS] indices of the tokens; those after the first `count` repeat the last one."""
    count: int
    columns: int
    """Columns of the KV cache that the tokens attend to."""

    @property
    def own(self) -> Indices:
        """[count] indices of the tokens, each once."""
        return self.members[: self.count]


def blocks_of(positions: Indices, stages: Indices | None = None) -> Iterator[Block]:
    """Yields blocks of the tokens at these positions [N] of their rows.

    Tokens that attend to the fewest columns come first, and others keep their order. So if the
    tokens of a row are given in the order of their positions, none is computed before one that it
    attends to. With blocks of two tokens, and widths of 4 and 8 columns:

        positions  0 1 2 5 3 6   ->   (0, 1) and (2, 3) of width 4, (5, 6) of width 8

    Only tokens of one stage [N] share a block, the first stage first.
    """
    columns = np.array([attended_columns(position) for position in positions.tolist()], np.int64)
    if stages is None:
        stages = np.zeros_like(columns)
    for stage, width in np.unique(np.stack((stages, columns), 1), axis=0).tolist():
        of_width = np.flatnonzero((stages == stage) & (columns == width))
        for start in range(0, len(of_width), ROWS):
            own = of_width[start : start + ROWS]
            members = np.pad(own, (0, ROWS - len(own)), mode="edge")
            yield Block(members, len(own), width)


def attended_columns(position: int) -> int:
    """Returns the number of columns that a token at this position attends to: at least those up to
    its own.
    """
    return round_up(position + 1, _COLUMNS_UNIT, maximum=1 << 62)


def compute_experts_in_blocks(model: nn.Module) -> None:
    """Makes every expert that a token of a block chooses compute the whole block, so that its
    products have one shape. Changes the modules that hold experts in place.
    """
    for module in expert_modules(model):
        module.forward = _in_blocks(module.forward)


def _in_blocks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [T, H] the weighted sum of each token's experts [T, k]."""
        count = len(hidden_states)
        if count != ROWS:
            return forward(hidden_states, top_k_index, top_k_weights)
        chosen, number = top_k_index.unique(return_inverse=True)  # [E], and [T, k] among these
        every = hidden_states.repeat(len(chosen), 1)
        index = chosen.repeat_interleave(count)[:, None]
        results = forward(every, index, torch.ones_like(index, dtype=top_k_weights.dtype))
        by_expert = results.unflatten(0, (len(chosen), count))
        own = by_expert[number, torch.arange(count, device=number.device)[:, None]]  # [T, k, H]
        return (own * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    return computed


class BlockPasses:
    """Prefills and decode steps in blocks, over the rows of `cache`."""

    def __init__(self, cache: SlotCache, forward: Forward) -> None:
        self._cache = cache
        self._forward = forward

    def check(self, vocabulary: int) -> None:
        """Checks, while no row runs, that a token's place in a block and the tokens beside it
        change nothing. Raises ConfigError where they do.

        It tries a sample of blocks of two sequences. One of the two fills from 1 to 63 places, so
        that its experts get as many tokens.
        """
        tokens = 7 * np.arange(2 * _PROBE) % vocabulary
        one, other = tokens.reshape(2, _PROBE).tolist()
        own = self.prefill([one], [0], first=0)
        others = self.prefill([other], [0], first=0)
        unequal = False
        for count in _COUNTS:
            together = [one] * count + [other] * (ROWS - count)
            found = self.prefill(together, range(ROWS), first=0)
            unequal |= bool((found[:count] != own).any() | (found[count:] != others).any())
        if unequal:
            raise ConfigError(
                "on this machine, what this model computes for a token depends on the tokens "
                "beside it, so that no run with it is reproducible",
                remedy="set reproducible false, or use another model",
            )

    def prefill(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[int], first: int
    ) -> Tensor:
        """Computes prompts, each in the first of its rows, and copies them to the others; see
        `Decoder.prefill`. Every prompt needs an owner.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        _, first_owners = np.unique(owners, return_index=True)
        own_rows = first + first_owners
        placed = [
            np.stack((prompt, np.full(len(prompt), row), np.arange(len(prompt))))
            for prompt, row in zip(prompts, own_rows, strict=True)
        ]
        tokens = np.concatenate(placed, axis=1)
        ends = np.cumsum(lengths) - 1
        longest = max(self._cache.longest, attended_columns(int(lengths.max()) - 1))
        self._cache.reserve(first + len(owners), longest)

        # Only the last token of a prompt needs the head, whose product is the largest of all. A
        # state is needed as it is after the token before, so then positions are stages.
        before_ends = np.delete(tokens, ends, axis=1)
        at = before_ends[_POSITION]
        for block in blocks_of(at, at if self._cache.has_states else None):
            self._run(block, before_ends, needs_logits=False)
        logits = self._logits(tokens[:, ends])

        self._cache.longest = longest
        sources = own_rows[list(owners)]
        targets = np.arange(first, first + len(owners))
        is_copy = sources != targets
        if is_copy.any():
            self._cache.move(targets[is_copy].tolist(), sources[is_copy].tolist())
        return logits[torch.tensor(owners, device=self._cache.device)]

    def decode(self, inputs: Inputs) -> Tensor:
        """Computes and samples one more token of rows 0..B-1; see `Decoder.decode`."""
        tokens, positions = inputs.state[:2].astype(np.int64)
        return self.sample(self.next_logits(tokens, positions), inputs)

    def next_logits(self, tokens: Indices, positions: Indices) -> Tensor:
        """Returns the logits [B, V] after `tokens` [B] at `positions` [B] of rows 0..B-1."""
        self._cache.reserve(len(tokens), attended_columns(int(positions.max())))
        return self._logits(np.stack((tokens, np.arange(len(tokens)), positions)))

    def sample(self, logits: Tensor, inputs: Inputs) -> Tensor:
        """Samples a token for every row of logits [B, V], in parts of `ROWS`; see
        `Decoder.sample`.
        """
        state = torch.from_numpy(inputs.state).to(logits.device)
        found: list[Tensor] = []
        for start in range(0, len(logits), ROWS):
            count = min(ROWS, len(logits) - start)
            members = torch.arange(start, start + ROWS, device=logits.device)
            members.clamp_(max=start + count - 1)
            sampled = sample(logits[members], state[:, members], inputs.plain, kept=inputs.kept)
            found.append(sampled[:, :count])
        return torch.cat(found, 1)

    def _logits(self, tokens: Indices) -> Tensor:
        """Returns the logits [N, V] after tokens [3, N], whose keys and values are computed too."""
        parts: list[Tensor] = []
        order: list[Indices] = []
        # A row begins without a state.
        for block in blocks_of(tokens[_POSITION], np.minimum(tokens[_POSITION], 1)):
            logits = self._run(block, tokens, needs_logits=True)
            parts.append(logits[: block.count])
            order.append(block.own)
        places = torch.from_numpy(np.argsort(np.concatenate(order)))
        return torch.cat(parts)[places.to(self._cache.device)]

    def _run(self, block: Block, tokens: Indices, *, needs_logits: bool) -> Tensor:
        """Computes a block of tokens [3, N]: the tokens, their rows and their positions."""
        chosen = torch.from_numpy(tokens.take(block.members, axis=1)).to(self._cache.device)
        of_block, of_rows, at = chosen
        begins = bool(tokens[_POSITION, block.members[0]] == 0)
        self._cache.begin_tokens(at, block.columns, of_rows, begins=begins)
        return self._forward(of_block, at, needs_logits)
