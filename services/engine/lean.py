"""Passes of decoders of Llama's form in a third of transformers' operators, for a CPU.

There, a token of a small model costs the calls of modules and operators, not their arithmetic. Here
projections of the same input are one product, and cosines and sines are those of a table.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from common.models.rotary import is_dynamic
from services.engine.attention import attend, attending_to
from services.engine.cache import SlotCache

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models that compute nothing else, whatever the position. Others with the same modules
scale their queries from some position on, or leave out rotations."""


class LeanDecoder:
    """The decoder of one of these models, with its weights: new values of these count at once."""

    def __init__(self, decoder: Any, max_tokens: int) -> None:
        """`max_tokens` bounds the positions."""
        self._embeddings = decoder.embed_tokens.weight
        self._layers = [_Layer(each) for each in decoder.layers]
        self._norm = decoder.norm
        both = decoder.rotary_emb(self._embeddings, torch.arange(max_tokens)[None])
        cosines, sines = torch.cat(both)
        # A half a, b is turned into -b, a: with the sign in the sines, the halves change places.
        sines[:, : sines.shape[1] // 2].neg_()
        self._rotations = torch.stack((cosines, sines), 1)
        """[positions, 2, head_dim]"""

    @classmethod
    def of(cls, module: Any, config: Any, max_tokens: int) -> "LeanDecoder | None":
        """Returns the decoder of a causal language model; None if it has another form, or is not in
        float32 on a CPU.
        """
        weight = module.get_input_embeddings().weight
        window = getattr(config, "sliding_window", None)
        is_plain = (
            config.model_type in _FAMILIES
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and (window is None or window >= max_tokens)
            and not is_dynamic(config.to_dict())
        )
        return cls(module.get_decoder(), max_tokens) if is_plain else None

    def __call__(self, tokens: Tensor, positions: Tensor | None, cache: SlotCache) -> Tensor:
        """Returns the last hidden states [B, T, H] of `tokens` [B, T] at `positions` [B, T], by
        default 0 to T - 1, in the pass that the cache has begun.
        """
        if positions is None:
            rotations = self._rotations[None, : tokens.shape[1]]
        else:
            rotations = self._rotations[positions]
        cosines, sines = rotations[:, :, :, None].unbind(2)  # [B or 1, T, 1, head_dim]

        hidden = embedding(tokens, self._embeddings)
        with attending_to(cache):
            for layer, kept in zip(self._layers, cache.layers, strict=True):
                hidden = layer(hidden, cosines, sines, kept)
        return _normed(hidden, self._norm)


class _Layer:
    """A decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._size = attention.head_dim
        self._scale = attention.scaling
        self._projections = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = attention.o_proj
        self._gates = _joined(mlp.gate_proj, mlp.up_proj)
        self._activation = mlp.act_fn
        self._down = mlp.down_proj
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        self._head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))

    def __call__(self, hidden: Tensor, cosines: Tensor, sines: Tensor, kept: Any) -> Tensor:
        """Returns the hidden states [B, T, H] after this layer; `kept` is its part of the cache."""
        rows, length, _ = hidden.shape
        states = linear(_normed(hidden, self._norms[0]), *self._projections)
        states = states.view(rows, length, -1, self._size)
        turned, values = states.split((self._heads + self._kv_heads, self._kv_heads), 2)
        if self._head_norms[0] is not None:
            parts = turned.split((self._heads, self._kv_heads), 2)
            normed = [
                _normed(part, norm) for part, norm in zip(parts, self._head_norms, strict=True)
            ]
            turned = torch.cat(normed, 2)
        turned = torch.addcmul(turned * cosines, turned.roll(self._size // 2, -1), sines)

        query, keys = turned.transpose(1, 2).split((self._heads, self._kv_heads), 1)
        keys, values = kept.update(keys, values.transpose(1, 2))
        found, _ = attend(None, query, keys, values, scaling=self._scale)
        hidden = hidden + linear(
            found.reshape(rows, length, -1), self._output.weight, self._output.bias
        )

        gate, up = linear(_normed(hidden, self._norms[1]), *self._gates).chunk(2, -1)
        inner = self._activation(gate).mul_(up)
        return hidden + linear(inner, self._down.weight, self._down.bias)


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    # torch's own is composed of twice as many operators, and copies.
    norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    factors = norms.square_().div_(hidden.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (hidden * factors).mul_(norm.weight)


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
