"""Attention over the slots of the KV cache, for transformers' models."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from common.errors import ConfigError
from learning.attention import attends_ahead
from services.engine.cache import SlotCache

_NAME = "rollout_slots"
_PASS: ContextVar[SlotCache] = ContextVar("pass")
"""The cache of the pass that this thread computes: not every model hands options on to its
attention."""


@contextmanager
def attending_to(cache: SlotCache) -> Iterator[None]:
    """Makes `attend` use this cache inside the context."""
    token = _PASS.set(cache)
    try:
        yield
    finally:
        _PASS.reset(token)


def replace_attention(module: Any, config: Any, max_context_tokens: int) -> bool:
    """Makes `module` use `attend`; returns False, and changes nothing, if transformers does not
    allow that for this model.

    Raises ConfigError for attention that the engine does not support.
    """
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_context_tokens:
        raise ConfigError(
            "the model attends within chunks that are shorter than the context",
            field="--max-context-tokens",
            value=max_context_tokens,
            remedy=f"use at most {chunk} with this model",
        )
    if attends_ahead(config):
        raise ConfigError(
            "the model's tokens attend to later tokens",
            field="use_bidirectional_attention",
            remedy="use a causal language model",
        )
    if module._can_set_attn_implementation():
        module.set_attn_implementation(_NAME)
        return True

    window: int | None = None
    if getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    if window is not None and window < max_context_tokens:
        raise ConfigError(
            "the model's attention window is shorter than the context, "
            "and transformers cannot replace its attention",
            field="--max-context-tokens",
            value=max_context_tokens,
            remedy=f"use at most {window} with this model",
        )
    return False


def attend(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_masks: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns [B, T, heads, D] from [B, heads, T, D], as transformers calls it; T > 1 is a causal
    prefill.

    Keys and values may have fewer heads (GQA). `softcap` caps scores (Gemma 2), `s_aux` [heads] are
    sinks (GPT-OSS).
    """
    if options.get("position_bias") is not None:
        raise RuntimeError("the embedded engine does not support attention with a position bias")
    heads, length, size = query.shape[1:]
    shared = heads // key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    cache = _PASS.get()
    mask = cache.mask(sliding_window)
    # No fused kernel caps scores or has sinks. For one query on a CPU, plain products take half the
    # time of the fused kernel.
    unfusable = softcap is not None or s_aux is not None
    if unfusable or (length == 1 and query.device.type == "cpu"):
        if length > 1 and mask is None:
            mask = cache.causal_mask()
        found = _by_products(
            query, key, value, scale=scale, mask=mask, softcap=softcap, sinks=s_aux
        )
        return found, None
    if length == 1:
        return _fused(query, key, value, scale=scale, mask=mask), None

    grouped = shared > 1
    if mask is not None and grouped:  # no GPU kernel supports both a mask and shared keys
        key = key.repeat_interleave(shared, 1)
        value = value.repeat_interleave(shared, 1)
        grouped = False
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return found.transpose(1, 2), None


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Returns [B, 1, heads, D] for one query per row.

    Heads that share a key become queries of one head, without copies.
    """
    batch, heads, _, size = query.shape
    packed = query.reshape(batch, key.shape[1], -1, size)
    found = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return found.reshape(batch, 1, heads, -1)


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention by two matrix products; returns [B, T, heads, D].

    `mask` broadcasts to [B, heads, T, L].
    """
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    columns = key.shape[2]
    # Heads that share a key are rows of one product, so keys and values need no copies.
    packed = query.reshape(batch * kv_heads, heads // kv_heads * length, size)
    if length == 1 and mask is not None and softcap is None:
        begin = mask.expand(batch, kv_heads, 1, columns).reshape(-1, 1, columns)
        mask = None
    else:
        begin = packed.new_zeros(())
    scores = torch.baddbmm(begin, packed, key.flatten(0, 1).transpose(1, 2), alpha=scale)
    scores = scores.view(batch, heads, length, columns)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:  # a column that takes weight but has no value
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)[..., :columns]
    found = torch.bmm(weights.reshape(batch * kv_heads, -1, columns), value.flatten(0, 1))
    return found.view(batch, heads, length, -1).transpose(1, 2)


AttentionInterface.register(_NAME, attend)
