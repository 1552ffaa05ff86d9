"""Plain CPU kernels for torch's variable-length attention, so that the GPU code path runs on a CPU.

They compute `torch.nn.attention.varlen.varlen_attn` as documented, one segment at a time, and check
the needs of GPU kernels.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import varlen


@cache
def install() -> None:
    """Registers the kernels for `torch_attn::_varlen_attn` and its gradient, once per process."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _segments(
    query: Tensor, key: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice]]:
    for starts, longest in ((cu_seq_q, max_q), (cu_seq_k, max_k)):
        assert starts.dtype == torch.int32
        assert int(starts.diff().max()) == longest
    assert query.is_contiguous()
    assert key.is_contiguous()
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_k[-1]) == len(key)
    for i in range(len(cu_seq_q) - 1):
        yield (
            slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1])),
            slice(int(cu_seq_k[i]), int(cu_seq_k[i + 1])),
        )


def _heads(states: Tensor, heads: int) -> Tensor:
    """Expands [tokens, kv heads, size] to [heads, tokens, size]."""
    return states.repeat_interleave(heads // states.shape[1], 1).transpose(0, 1)


def _scores(
    query: Tensor, key: Tensor, scale: float | None, window: Sequence[int], is_causal: bool
) -> Tensor:
    """Returns [heads, queries, keys]; the last query and the last key belong to the same token."""
    behind, ahead = window[0], 0 if is_causal else window[1]
    place = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1]
    distance = torch.arange(key.shape[1]) - place
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if behind >= 0:
        allowed &= distance >= -behind
    if ahead >= 0:
        allowed &= distance <= ahead
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~allowed, float("-inf"))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert enable_gqa or key.shape[1] == query.shape[1]
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert seqused_k is block_table is None
    result, heads = torch.empty_like(query), query.shape[1]
    lse = query.new_zeros(heads, len(query), dtype=torch.float32)
    for q, k in _segments(query, key, cu_seq_q, cu_seq_k, max_q, max_k):
        scores = _scores(
            query[q].transpose(0, 1),
            _heads(key[k], heads),
            scale,
            window_size or (-1, -1),
            is_causal,
        )
        lse[:, q] = scores.logsumexp(-1)
        result[q] = (scores.softmax(-1) @ _heads(value[k], heads)).transpose(0, 1)
    return result, lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads, (heads, kv_heads) = (
        tuple(torch.zeros_like(states) for states in (query, key, value)),
        (query.shape[1], key.shape[1]),
    )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for q, k in _segments(query, key, cu_seq_q, cu_seq_k, max_q, max_k):
        queries, keys, values = (
            query[q].transpose(0, 1),
            _heads(key[k], heads),
            _heads(value[k], heads),
        )
        # As FlashAttention does: from the given log-sum-exp and result.
        scores = _scores(queries, keys, scale, window_size or (-1, -1), is_causal)
        weights = (scores - lse[:, q, None]).exp()
        upper = grad_out[q].transpose(0, 1)
        of_weights = upper @ values.transpose(1, 2)
        mean = (upper * out[q].transpose(0, 1)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean) * factor
        grads[0][q] = (of_scores @ keys).transpose(0, 1)
        for grad, found in (
            (grads[1], of_scores.transpose(1, 2) @ queries),
            (grads[2], weights.transpose(1, 2) @ upper),
        ):
            grad[k] = found.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
    return grads[0], grads[1], grads[2]
