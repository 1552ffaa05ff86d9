"""Passes of decoders of Llama's form in a fifth of transformers' operators, for a CPU.

There, a token of a small model costs the calls of modules and operators, not their arithmetic. Here
projections of the same input are one product, and what is between products is one call each of our
own kernels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from common.models.rotary import is_dynamic
from services.engine.attention import attend, attending_to
from services.engine.cache import SlotCache
from services.engine.kernels import compiled

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models that compute nothing else, whatever the position. Others with the same modules
scale their queries from some position on, or leave out rotations."""


class LeanDecoder:
    """The decoder of one of these models, with its weights: new values of these count at once."""

    def __init__(self, decoder: Any, max_tokens: int) -> None:
        """`max_tokens` bounds the positions."""
        self._embeddings = decoder.embed_tokens.weight
        both = decoder.rotary_emb(self._embeddings, torch.arange(max_tokens)[None])
        cosines, sines = torch.cat(both)
        # A half a, b is turned into -b, a: with the sign in the sines, the halves change places.
        sines[:, : sines.shape[1] // 2].neg_()
        rotations = torch.stack((cosines, sines), 1)
        self._layers = [_Layer(each, rotations) for each in decoder.layers]
        self._norm = decoder.norm

    @classmethod
    def of(cls, module: Any, config: Any, max_tokens: int) -> "LeanDecoder | None":
        """Returns the decoder of a causal language model; None if it has another form or is not in
        float32 on a CPU, or if no compiler is here.
        """
        weight = module.get_input_embeddings().weight
        window = getattr(config, "sliding_window", None)
        is_plain = (
            config.model_type in _FAMILIES
            and config.hidden_act == "silu"
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and (window is None or window >= max_tokens)
            and not is_dynamic(config.to_dict())
        )
        return cls(module.get_decoder(), max_tokens) if is_plain and compiled() else None

    def __call__(self, tokens: Tensor, positions: Tensor | None, cache: SlotCache) -> Tensor:
        """Returns the last hidden states [B, T, H] of `tokens` [B, T] at `positions` [B, T], by
        default 0 to T - 1, in the pass that the cache has begun.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        places = positions.flatten()
        hidden = embedding(tokens, self._embeddings)
        with attending_to(cache):
            for layer, kept in zip(self._layers, cache.layers, strict=True):
                layer(hidden, places, kept, cache.token_rows)
        return _normed(hidden, self._norm)


class _Layer:
    """A decoder layer."""

    def __init__(self, layer: Any, rotations: Tensor) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        size = attention.head_dim
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._projections = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads = attention.q_proj.out_features // size
        self._kv_heads = attention.k_proj.out_features // size
        self._size = size
        self._scale = attention.scaling
        self._rotations = rotations
        """[positions, 2, head_dim]"""
        self._head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        self._output = attention.o_proj
        self._gates = _joined(mlp.gate_proj, mlp.up_proj)
        self._down = mlp.down_proj

    def __call__(
        self, hidden: Tensor, positions: Tensor, kept: Any, token_rows: Tensor | None
    ) -> None:
        """Turns the hidden states [B, T, H] before this layer into those after it, in place.

        `positions` [B · T] are those of all tokens, `kept` is the layer's part of the cache, and
        `token_rows` [B] are the cache's rows of single tokens; None: a prefill.
        """
        batch, length, _ = hidden.shape
        states = linear(_normed(hidden, self._norms[0]), *self._projections)
        states = states.view(batch, length, -1, self._size)
        self._rotate(states, positions)
        if token_rows is None:
            query, *new = states.transpose(1, 2).split(
                (self._heads, self._kv_heads, self._kv_heads), 1
            )
            found, _ = attend(None, query, *kept.update(*new), scaling=self._scale)
        else:
            found = self._attended(states, positions, kept, token_rows)
        _add_product(hidden, found, self._output)

        both = linear(_normed(hidden, self._norms[1]), *self._gates)
        inner = both.new_empty(batch, length, both.shape[2] // 2)
        compiled().gate(both=both, out=inner, rows=batch * length, size=inner.shape[2])
        _add_product(hidden, inner, self._down)

    def _rotate(self, states: Tensor, positions: Tensor) -> None:
        """Normalises, in models that do so, and rotates queries and keys in place."""
        query_norm, key_norm = self._head_norms
        compiled().rotate(
            states=states,
            positions=positions,
            rotations=self._rotations,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            epsilon=0.0 if query_norm is None else query_norm.variance_epsilon,
            tokens=len(positions),
            heads=self._heads,
            kv_heads=self._kv_heads,
            size=self._size,
        )

    def _attended(self, states: Tensor, positions: Tensor, kept: Any, rows: Tensor) -> Tensor:
        """Stores keys and values of one token of each of `rows`; returns what their queries find
        in their rows, [B, 1, heads · head_dim].
        """
        if not kept.is_initialized:
            like = states[:, :, : self._kv_heads].transpose(1, 2)
            kept.make_room(like, like)
        found = states.new_empty(len(rows), 1, self._heads * self._size)
        compiled().attend(
            states=states,
            token_rows=rows,
            positions=positions,
            keys=kept.keys,
            values=kept.values,
            out=found,
            tokens=len(rows),
            heads=self._heads,
            kv_heads=self._kv_heads,
            size=self._size,
            columns=kept.keys.shape[2],
            scale=self._scale,
            threads=torch.get_num_threads(),
        )
        return found


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    size = hidden.shape[-1]
    normed = torch.empty_like(hidden)
    compiled().norm(
        hidden=hidden,
        weight=norm.weight,
        epsilon=norm.variance_epsilon,
        out=normed,
        rows=hidden.numel() // size,
        size=size,
    )
    return normed


def _add_product(hidden: Tensor, inputs: Tensor, layer: nn.Linear) -> None:
    """Adds a layer's output for `inputs` [B, T, …] to `hidden` [B, T, H] in place."""
    flat = hidden.view(-1, hidden.shape[2])
    flat.addmm_(inputs.reshape(len(flat), -1), layer.weight.t())
    if layer.bias is not None:
        flat += layer.bias


def _joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of layers with the same input as one. Theirs become views of it."""
    joined: list[Tensor | None] = []
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        if parameters[0] is None:
            joined.append(None)
            continue
        whole = torch.cat([each.data for each in parameters])
        parts = whole.split([len(each) for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
        joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias
