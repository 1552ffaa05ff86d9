"""Attention over packed rows: a prompt attends to itself, a completion to its prompt and itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.errors import ConfigError
from learning.context import ContextGroup

_Array = NDArray[np.int64]

NAME = "packed"
"""Name of the attention function in transformers' registry. Without `segments` it is plain SDPA."""

_WASTE = 0.9
"""Rows are computed together if the shortest has at least this share of the longest's tokens."""
_SKIP = 0.25
"""Share of the prompt in a row above which a mask is cheaper than also computing the prompt's
queries."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
GQA = "enable_gqa" in signature(varlen_attn).parameters
"""Whether the kernel supports fewer key and value heads than query heads, as torch's does since
2.12."""


@dataclass(slots=True)
class Segments:
    """The prompts and completions of a packed line of T tokens, in two forms for two kinds of
    kernels.

    Variable-length kernels take the line and the keys of every segment. Other kernels take segments
    of similar length together, each as a row with its prompt's tokens and its own.

    For example, a prompt of 3 tokens and its two completions of 2 and 1:

        line        p0 p1 p2 a0 a1 b0
        starts      0        3     5  6
        keys        p0 p1 p2 | p0 p1 p2 a0 a1 | p0 p1 p2 b0
        key_starts  0          3                8            12
        buckets     one row of width 3, one of width 5 and one of width 4; of the last two the first
                    3 tokens are only keys
    """

    mask: Tensor
    """[1, 1, 1, 1] placeholder for a finished mask, so that the model makes none."""
    starts: Tensor
    """[segments + 1] int32: the start of each segment in the line, and the end of the last."""
    key_starts: Tensor
    """[segments + 1] int32: the start of each segment's keys, and the end of the last."""
    keys: Tensor
    """[K] the keys of all segments as positions in the line: the prompt's keys, then the segment's
    own."""
    row_queries: Tensor
    """[sum of rows · (width - skip)] queries as positions in the line, by bucket and row; 0 after
    the end of a row."""
    row_keys: Tensor
    """[sum of rows · width] keys, likewise."""
    back: Tensor
    """[T] the position of each token of the line in `row_queries`."""
    longest: int
    """Tokens of the longest segment."""
    longest_keys: int
    """Keys of the segment that has most."""
    buckets: list[tuple[int, int, int]]
    """Per bucket: rows, width, and how many tokens at the start of every row are only keys (the
    prompts' tokens)."""

    @classmethod
    def of(
        cls, starts: _Array, sizes: _Array, prefix_starts: _Array, prefixes: _Array
    ) -> "Segments":
        """Describes consecutive segments that begin at `starts` in the line, and the prompts that
        come before them.

        All [segments]; `prefixes` are the prompts' lengths, 0 for the prompts themselves. No size
        is 0.
        """
        totals = prefixes + sizes
        key = _within(totals)
        prefix = np.repeat(prefixes, totals)
        from_prompt = np.repeat(prefix_starts, totals)
        from_segment = np.repeat(starts - prefixes, totals)
        keys = key + np.where(key < prefix, from_prompt, from_segment)
        first = np.cumsum(totals) - totals

        row_queries: list[_Array] = []
        row_keys: list[_Array] = []
        buckets: list[tuple[int, int, int]] = []
        places = np.empty_like(starts)
        size = 0
        for part in _similar_lengths(prefixes, totals):
            width = int(totals[part[0]])
            skip = int(prefixes[part].min())
            if skip < _SKIP * width:
                skip = 0
            columns = np.arange(width)
            inside = columns < totals[part, None]
            place = np.minimum(first[part, None] + columns, len(keys) - 1)
            row = np.where(inside, keys[place], 0)
            row_keys.append(row.reshape(-1))
            row_queries.append(row[:, skip:].reshape(-1))
            places[part] = size + np.arange(len(part)) * (width - skip) + prefixes[part] - skip
            size += len(row_queries[-1])
            buckets.append((len(part), width, skip))

        return cls(
            mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            starts=_bounds(sizes),
            key_starts=_bounds(totals),
            keys=torch.from_numpy(keys),
            row_queries=torch.from_numpy(np.concatenate(row_queries)),
            row_keys=torch.from_numpy(np.concatenate(row_keys)),
            back=torch.from_numpy(np.repeat(places, sizes) + _within(sizes)),
            longest=int(sizes.max()),
            longest_keys=int(totals.max()),
            buckets=buckets,
        )


def register() -> None:
    """Registers `NAME` with transformers."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def unpackable(model: Any) -> str | None:
    """Returns why `model` cannot be computed packed; None when it can."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    rope = getattr(config, "rope_parameters", None) or {}
    rotates = any(name.endswith("rotary_emb") for name, _ in body.named_modules())
    has_sinks = any(name.endswith("sinks") for name, _ in body.named_parameters())
    looks_ahead = bool(getattr(config, "use_bidirectional_attention", None))
    takes_backends = getattr(body, "_supports_attention_backend", False)
    replaceable = takes_backends and body._can_set_attn_implementation()
    implementation = config._attn_implementation
    checks = {
        "it keeps a state from token to token": getattr(body, "_is_stateful", False),
        f"it has {', '.join(sorted(layers))} layers": bool(layers),
        "it does not rotate positions": not rotates,
        "its positions have several axes": "mrope_section" in rope,
        "it caps attention": bool(getattr(config, "attn_logit_softcapping", None)),
        "it has attention sinks": has_sinks,
        "its tokens attend to later tokens": looks_ahead,
        "its keys and values differ in size": getattr(config, "v_head_dim", None) is not None,
        "its attention has dropout": bool(getattr(config, "attention_dropout", 0)),
        "transformers cannot replace its attention": not replaceable,
        f"it runs with {implementation} attention": implementation not in ("sdpa", NAME),
    }
    return next((reason for reason, applies in checks.items() if applies), None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns [1, T, heads, size] from [1, heads, T, size], as transformers calls it.

    Keys and values may have fewer heads (GQA). `sliding_window` includes the token itself. With
    `context`, T are the tokens of this rank's part of the line.
    """
    segments: Segments | None = options.pop("segments", None)
    context: ContextGroup | None = options.pop("context", None)
    if segments is None:
        has_placeholder = attention_mask is not None and attention_mask.shape == (1, 1, 1, 1)
        if has_placeholder and query.shape[2] > 1:  # it is a packed line
            raise ConfigError(
                "the layers of this model pass no options on to their attention, "
                "so its rows cannot be packed",
                field="trainer.packing",
                remedy="set it to off",
            )
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask=attention_mask, **options
        )
        return plain

    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # rotary embedding returns float32
        dtype = torch.get_autocast_dtype(device_type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    query = query[0].transpose(0, 1)
    key = key[0].transpose(0, 1)
    value = value[0].transpose(0, 1)

    if context is not None:
        length = len(segments.back)
        query = context.heads_of_line(query, length)
        key = context.heads_of_line(key, length)
        value = context.heads_of_line(value, length)
    attend = _attend_segments if _has_kernel(query) else _attend_rows
    result = attend(
        query,
        key,
        value,
        segments=segments,
        scaling=options.get("scaling"),
        window=options.get("sliding_window"),
    )
    if context is not None:
        result = context.tokens_of_line(result)
    return result[None], None


def _has_kernel(query: Tensor) -> bool:
    """Whether variable-length flash attention is available: half precision on an NVIDIA GPU, Ampere
    or later.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def _attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Returns [T, heads, size] for query, key and value [T, heads, size] of a line; keys and values
    may have fewer heads.
    """
    options: dict[str, Any] = {}
    if GQA:
        options["enable_gqa"] = True
    else:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    # A segment's last query and last key are of one token, so nothing is to the right of it.
    window_size = (-1 if window is None else window - 1, 0)
    result = varlen_attn(
        query.contiguous(),
        _take(key, segments.keys),
        _take(value, segments.keys),
        cu_seq_q=segments.starts,
        cu_seq_k=segments.key_starts,
        max_q=segments.longest,
        max_k=segments.longest_keys,
        scale=scaling,
        window_size=window_size,
        **options,
    )
    assert isinstance(result, Tensor)
    return result


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Returns what `_attend_segments` does, with one plain kernel call for each bucket.

    The keys of a row are those of its prompt and its own. Its first `skip` tokens, which belong to
    the prompt, are keys only: their queries are computed in the prompt's own row.
    """
    query_sizes = [count * (width - skip) for count, width, skip in segments.buckets]
    key_sizes = [count * width for count, width, _ in segments.buckets]
    queries = _take(query, segments.row_queries).split(query_sizes)
    keys = _take(key, segments.row_keys).split(key_sizes)
    values = _take(value, segments.row_keys).split(key_sizes)

    results: list[Tensor] = []
    for i, (count, width, skip) in enumerate(segments.buckets):
        rows = queries[i].unflatten(0, (count, -1)).transpose(1, 2)
        # 0 where a query may look, at itself and earlier (in its window), and -inf elsewhere.
        causal = skip == 0 and (window is None or window >= width)
        mask: Tensor | None = None
        if not causal:
            hidden = rows.new_ones(width - skip, width, dtype=torch.bool).triu(skip + 1)
            if window is not None:
                hidden |= torch.ones_like(hidden).tril(skip - window)
            mask = rows.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        result = scaled_dot_product_attention(
            rows,
            keys[i].unflatten(0, (count, -1)).transpose(1, 2),
            values[i].unflatten(0, (count, -1)).transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=True,
        )
        results.append(result.transpose(1, 2).flatten(0, 1))
    line = torch.cat(results) if len(results) > 1 else results[0]
    return _take(line, segments.back)


def _take(states: Tensor, places: Tensor) -> Tensor:
    """Gathers [N, heads, size] from [T, heads, size], as an embedding, whose gradient needs no
    atomic additions.
    """
    return embedding(places, states.reshape(len(states), -1)).view(len(places), *states.shape[1:])


def _similar_lengths(prefixes: _Array, totals: _Array) -> Iterator[_Array]:
    """Yields segments of similar length, longest first; prompts and completions apart."""
    for among in (np.flatnonzero(prefixes == 0), np.flatnonzero(prefixes)):
        order = among[np.argsort(-totals[among], kind="stable")]
        while len(order):
            end = int((totals[order] >= _WASTE * totals[order[0]]).sum())
            yield order[:end]
            order = order[end:]


def _within(sizes: _Array) -> _Array:
    """Returns 0 … size - 1 for each size, concatenated."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _bounds(sizes: _Array) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
