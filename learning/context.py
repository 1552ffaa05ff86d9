"""Context parallelism: the ranks of a group compute one packed line together, each its own part.

    tokens [T] ─► own part [T / ranks] ─► layer by layer ─► own log-probabilities ─► all of them [C]
                                             │
                            attention: all tokens, own heads

Everything but attention treats every token alone. For attention the ranks exchange tokens for heads
(DeepSpeed Ulysses, arXiv:2309.14509): each gets all tokens of some heads, so that any mask and any
kernel work as on one rank. The exchange moves 4 · T · H / ranks numbers a layer and pass.

The ranks of a group have the same rows. Each computes the loss of all of them, but only its own
tokens' gradient: summed over all ranks, as in data parallelism, it is that of one rank.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from common.errors import ConfigError


class ContextGroup:
    """The ranks that compute a packed line together; `rank` is this one's place among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def bounds(self, length: int) -> tuple[int, int]:
        """Returns where this rank's part of a line of `length` tokens starts and ends. Parts have
        the same length; the last ones may reach beyond the end of the line.
        """
        width = -(-length // self.size)
        return self.rank * width, (self.rank + 1) * width

    def part(self, line: Tensor) -> Tensor:
        """Returns this rank's part [1, W] of a line [1, T], with zeros beyond its end."""
        start, end = self.bounds(line.shape[1])
        own = line[:, start:end]
        return torch.nn.functional.pad(own, (0, end - start - own.shape[1]))

    def heads_of_line(self, states: Tensor, length: int) -> Tensor:
        """Returns [T, heads / ranks, size], this rank's heads of all `length` tokens T, from
        [W, heads, size], all heads of this rank's tokens. With a gradient.

        Heads that cannot be divided are repeated, as the query heads that share them are on several
        ranks.
        """
        heads = states.shape[1]
        # Two heads of keys on 4 ranks, for example, are repeated twice: every rank gets one.
        states = states.repeat_interleave(math.lcm(heads, self.size) // heads, 1)
        by_rank = states.unflatten(1, (self.size, -1)).transpose(0, 1)  # [ranks, W, ...]
        return self._exchange(by_rank).flatten(0, 1)[:length]

    def tokens_of_line(self, states: Tensor) -> Tensor:
        """Returns [W, heads, size], all heads of this rank's tokens, from [T, heads / ranks, size],
        this rank's heads of all tokens. With a gradient.
        """
        start, end = self.bounds(len(states))
        missing = self.size * (end - start) - len(states)
        padded = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, missing))
        by_rank = padded.unflatten(0, (self.size, -1))  # [ranks, W, ...]
        return self._exchange(by_rank).transpose(0, 1).flatten(1, 2)

    def gather(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """Returns [C] the values of all tokens, from those of this rank's tokens.

        The gradient of a token goes to the rank that computed it, once: every rank computes the
        same loss.

        Args:
            values: [number of own tokens]
            own: their indices among the C tokens, int64.
            count: C.
        """
        gathered: Tensor = _Gather.apply(values, own, count, self._group)
        return gathered

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """Returns [ranks, ...] what every rank sends to this one, from what this one sends to
        every rank. With a gradient.
        """
        exchanged: Tensor = all_to_all_single_autograd(
            by_rank.contiguous(), None, None, self._group
        )
        return exchanged


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(own)
        gathered = values.new_zeros(count)
        gathered[own] = values
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None


def check_heads(model: Any, context: ContextGroup) -> None:
    """Raises ConfigError when the attention heads of a transformers model cannot be divided among
    the ranks of a group.
    """
    heads = model.config.get_text_config().num_attention_heads
    if heads % context.size:
        raise ConfigError(
            f"the model's {heads} attention heads cannot be divided among {context.size} ranks",
            field="parallel.context_size",
            value=context.size,
            remedy=f"use a divisor of {heads}",
        )
