"""Attention over packed rows: a prompt attends to itself, a completion to its prompt and itself."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from learning.context import ContextGroup
from learning.linear_layers import linear_layers, not_packed

_Array = NDArray[np.int64]

NAME = "packed"
"""Name of the attention function in transformers' registry. Without `segments` it is plain SDPA."""

# Rows are computed together if the shortest has at least this share of the longest's tokens.
_WASTE = 0.9
# Share of the prompt in a row above which a mask is cheaper than also computing the prompt's
# queries.
_SKIP = 0.25
# The attention functions of transformers that do what `NAME` does.
_REPLACED = ("sdpa", "eager", NAME)
# Scores of queries and keys that exist at once where no kernel computes them: 256 MiB in float32.
_SCORES = 1 << 26
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe"}
_LINEAR_LAYERS = {"linear_attention", "conv", "hybrid"}
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
    columns: tuple[_Array, ...]
    """What `of` was given, which stays in CPU memory."""

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
        key = ranges(0, totals)
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
            back=torch.from_numpy(np.repeat(places, sizes) + ranges(0, sizes)),
            longest=int(sizes.max()),
            longest_keys=int(totals.max()),
            buckets=buckets,
            columns=(starts, sizes, prefix_starts, prefixes),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """How the scores of queries and keys are made: cap · tanh(scaling · q·k / cap), or scaling ·
    q·k.
    """

    scaling: float
    window: int | None = None
    """How many tokens a query sees, itself included; None for all earlier ones."""
    cap: float | None = None
    sinks: Tensor | None = None
    """[heads] a further score of every query, whose value is 0."""


def register() -> None:
    """Registers `NAME` with transformers."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attends_ahead(config: Any) -> bool:
    """Whether tokens of text attend to later ones; those of an image may (`vision`, Gemma 4)."""
    return getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")


def unpackable(model: Any) -> str | None:
    """Returns why `model` cannot be computed packed; None when it can."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model
    config = model.config.get_text_config()
    linear = linear_layers(body)
    kinds = list(getattr(config, "layer_types", None) or ())
    if len(linear) == sum(kind in _LINEAR_LAYERS for kind in kinds):
        kinds = [kind for kind in kinds if kind not in _LINEAR_LAYERS]
    layers = set(kinds) - _KNOWN_LAYERS
    is_stateful = getattr(body, "_is_stateful", False)
    rotates = any(name.endswith("rotary_emb") for name, _ in body.named_modules())
    implementation = config._attn_implementation
    checks = {
        "it keeps a state from token to token": is_stateful and not (linear or kinds),
        f"it has {', '.join(sorted(layers))} layers": bool(layers),
        "it does not rotate positions": not (rotates or linear),
        "its tokens attend to later tokens": attends_ahead(config),
        "its attention has dropout": bool(getattr(config, "attention_dropout", 0)),
        "transformers cannot replace its attention": not body._can_set_attn_implementation(),
        f"it runs with {implementation} attention": implementation not in _REPLACED,
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
    """Returns [1, T, heads, value size] from [1, heads, T, size], as transformers calls it.

    Keys and values may have fewer heads (GQA), and values another size. Of the options,
    `sliding_window` includes the token itself, `softcap` bounds scores and `s_aux` [heads] are
    sinks. With `context`, T are the tokens of this rank's part of the line.
    """
    segments: Segments | None = options.pop("segments", None)
    context: ContextGroup | None = options.pop("context", None)
    scores = Scores(
        scaling=options.pop("scaling", None) or query.shape[-1] ** -0.5,
        window=options.pop("sliding_window", None),
        cap=options.pop("softcap", None),
        sinks=options.pop("s_aux", None),
    )
    if segments is None:
        padded = _attend_padded(
            module, query, key, value, mask=attention_mask, scores=scores, **options
        )
        return padded, None
    if attention_mask is not None and attention_mask.shape != segments.mask.shape:
        raise not_packed("make a mask of their own")
    for name, option in options.items():
        if isinstance(option, Tensor) and option.is_floating_point():
            raise not_packed(f"give their attention {name}")

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
        if scores.sinks is not None:
            own = scores.sinks.chunk(context.size)[context.rank]
            scores = replace(scores, sinks=own)
    suits_kernel = scores.cap is None and value.shape[-1] <= query.shape[-1]
    attend = _attend_segments if suits_kernel and _has_kernel(query) else _attend_rows
    result = attend(query, key, value, segments=segments, scores=scores)
    if context is not None:
        result = context.tokens_of_line(result)
    return result[None], None


def _attend_padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scores: Scores,
    **options: Any,
) -> Tensor:
    """Returns [rows, T, heads, value size] from [rows, heads, T, size] of rows that are not packed,
    with the mask of transformers' SDPA.
    """
    is_placeholder = mask is not None and mask.shape == (1, 1, 1, 1)
    if is_placeholder and query.shape[2] > 1:  # it is a packed line
        raise not_packed("pass no options on to their attention")
    if scores.cap is None and scores.sinks is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask=mask, scaling=scores.scaling, **options
        )
        return plain[0]
    if mask is None:
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return _attend_plainly(query, key, value, visible=mask, scores=scores).transpose(1, 2)


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
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
) -> Tensor:
    """Returns [T, heads, value size] for query, key and value [T, heads, size] of a line; keys and
    values may have fewer heads, and values a smaller size.
    """
    options: dict[str, Any] = {}
    if GQA:
        options["enable_gqa"] = True
    else:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    # The kernel has one size for all three. Zeros behind a value are zeros behind the result.
    size = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - size))
    tensors = (query.contiguous(), _take(key, segments.keys), _take(value, segments.keys))
    # A segment's last query and last key are of one token, so nothing is to the right of it.
    options |= {
        "scale": scores.scaling,
        "window_size": (-1 if scores.window is None else scores.window - 1, 0),
    }
    line = (segments.starts, segments.key_starts, segments.longest, segments.longest_keys)
    if scores.sinks is None:
        result = varlen_attn(*tensors, *line, **options)
    else:
        result = _WithSinks.apply(*tensors, scores.sinks, line, options)
    assert isinstance(result, Tensor)
    return result[..., :size]


class _WithSinks(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Variable-length attention where every query may also attend to the sink of its head, a score
    whose value is 0.

    With the log-sum-exp l of a query's scores, and its head's sink s,

        l' = log(exp l + exp s)      o' = o · exp(l - l')

    The backward pass of the kernel computes its weights as exp(scores - l) and needs nothing else
    of the forward pass but o, so it gets l' and o'. Autograd cannot do this: torch's gradient of
    the kernel ignores that of l.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        *given: Any,
    ) -> Tensor:
        line, options = given
        starts, key_starts, longest, longest_keys = line
        result, lse = varlen_attn(
            query,
            key,
            value,
            *line,
            return_aux=AuxRequest(lse=True),
            **options,
        )
        with_sink = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T]
        result = result * (lse - with_sink).exp().t()[..., None].to(result.dtype)
        kept = (query, key, value, sinks, starts, key_starts, result, with_sink)
        ctx.save_for_backward(*kept)
        ctx.longest = (longest, longest_keys)
        ctx.options = options
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, starts, key_starts, result, with_sink = ctx.saved_tensors
        window = ctx.options["window_size"]
        longest, longest_keys = ctx.longest
        of_tensors = torch.ops.torch_attn._varlen_attn_backward(
            grad_out=gradient.contiguous(),
            query=query,
            key=key,
            value=value,
            out=result,
            lse=with_sink,
            cu_seq_q=starts,
            cu_seq_k=key_starts,
            max_q=longest,
            max_k=longest_keys,
            is_causal=window == (-1, 0),
            rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),  # no dropout
            scale=ctx.options["scale"],
            window_size=list(window),
        )
        # The gradient of a score is its weight · (that of the weight - its mean); the sink's is 0.
        mean = (gradient.float() * result.float()).sum(-1).t()
        weight = (sinks.float()[:, None] - with_sink).exp()
        of_sinks = -(weight * mean).sum(1).to(sinks.dtype)
        return (*of_tensors, of_sinks, None, None)


# The compiler would make a graph for each list of buckets.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch is not typed here
def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
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
        rows = (
            queries[i].unflatten(0, (count, -1)).transpose(1, 2),
            keys[i].unflatten(0, (count, -1)).transpose(1, 2),
            values[i].unflatten(0, (count, -1)).transpose(1, 2),
        )
        # Where a query may look: at itself and earlier, in its window.
        causal = skip == 0 and (scores.window is None or scores.window >= width)
        visible = query.new_ones(width - skip, width, dtype=torch.bool).tril(skip)
        if scores.window is not None:
            visible &= torch.ones_like(visible).triu(skip - scores.window + 1)
        if scores.cap is None and scores.sinks is None:
            result = scaled_dot_product_attention(
                *rows,
                attn_mask=None if causal else visible,
                is_causal=causal,
                scale=scores.scaling,
                enable_gqa=True,
            )
        else:
            # The scores of a few rows at a time, which the backward pass computes again.
            few = max(1, _SCORES // (query.shape[1] * visible.numel()))
            parts = zip(*(states.split(few) for states in rows), strict=True)
            result = torch.cat(
                [
                    checkpoint(
                        _attend_plainly,
                        *part,
                        visible=visible,
                        scores=scores,
                        use_reentrant=False,
                    )
                    for part in parts
                ]
            )
        results.append(result.transpose(1, 2).flatten(0, 1))
    line = torch.cat(results) if len(results) > 1 else results[0]
    return _take(line, segments.back)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: Scores
) -> Tensor:
    """Returns [rows, heads, Q, value size] from query [rows, heads, Q, size], and key and value of
    K tokens and maybe fewer heads, with all scores in memory: for what no kernel computes.

    `visible` [..., Q, K] says which keys a query sees.
    """
    heads = query.shape[1]
    groups = heads // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    found = (query @ key.transpose(2, 3)).float() * scores.scaling
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    found = found.masked_fill(~visible, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(heads, 1, 1)
        found = torch.cat([found, sinks.expand(*found.shape[:-1], 1)], -1)
    weights = found.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _take(states: Tensor, places: Tensor) -> Tensor:
    """Gathers [N, heads, size] from [T, heads, size]."""
    return gathered(states.reshape(len(states), -1), places).view(len(places), *states.shape[1:])


def gathered(states: Tensor, places: Tensor) -> Tensor:
    """Returns the rows `places` [N] of states [T, H]; their gradients are added in one order."""
    if states.device.type == "cpu":
        return states.index_select(0, places)  # forward and backward in less than half the time
    return embedding(places, states)  # whose gradient needs no atomic additions


def _similar_lengths(prefixes: _Array, totals: _Array) -> Iterator[_Array]:
    """Yields segments of similar length, longest first; prompts and completions apart."""
    for among in (np.flatnonzero(prefixes == 0), np.flatnonzero(prefixes)):
        order = among[np.argsort(-totals[among], kind="stable")]
        while len(order):
            end = int((totals[order] >= _WASTE * totals[order[0]]).sum())
            yield order[:end]
            order = order[end:]


def ranges(starts: _Array | int, sizes: _Array) -> _Array:
    """Returns start, start + 1 … start + size - 1 for each pair, concatenated."""
    found: _Array = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return found


def _bounds(sizes: _Array) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
