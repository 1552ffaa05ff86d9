"""Attention of a decode step on a CPU: plain batched products, half the time of the fused kernel for one query."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "rollout_decode"


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Query [B, heads, T, D], key and value [B, kv_heads, L, D], additive mask [B, 1, 1, L]; T > 1 is a causal prefill."""
    if query.shape[2] > 1 or attention_mask is None or options.get("softcap") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    batch, heads, _, size = query.shape
    kv_heads = key.shape[1]
    scaling = options.get("scaling") or size**-0.5
    # The heads that share a key are rows of one product, so keys and values are never repeated.
    packed = (query * scaling).view(batch, kv_heads, heads // kv_heads, size)
    weights = torch.softmax(packed @ key.transpose(2, 3) + attention_mask, -1)
    return (weights @ value).view(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, _attend)
