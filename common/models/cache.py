"""What engines keep of a sequence, from a model's `config.json`: keys and values in its attention
layers, states in its linear layers (Mamba 2, gated delta rules, short convolutions).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.models.memory import KNOWN, incomplete, number_bytes
from common.settings.config import Config

_MAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_DELTA = (
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_conv_kernel_dim",
)
_STATES = {
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "granitemoehybrid": _MAMBA,
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "nemotron_h": (
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
    ),
}
"""By `model_type`: the names of heads and their width, of groups of keys and their width, and of
the size of the convolution."""
_CONVOLUTIONS = ("lfm2", "lfm2_moe")
_ATTENTION = ("full_attention", "sliding_attention", "attention", "hybrid", "*")
_LINEAR = ("linear_attention", "mamba", "conv", "hybrid", "M")
"""Kinds of layers in configurations; a hybrid layer is both."""
_STATE_BYTES = 4
"""Bytes of a number of a recurrent state, which is float32 in every engine."""
_CONV_BYTES = 2
"""Bytes of a number that SGLang keeps of a convolution's input."""
_STATES_SHARE = 0.9 / 1.9
"""SGLang's share of the room for states (`--mamba-full-memory-ratio` 0.9, to keys and values)."""
_STATES_OF_REQUEST = 5
"""States for which SGLang has room for a running request: its own, and those of prefixes that it
caches while it schedules ahead (3 without that)."""
_EMBEDDED_SHARE = 0.3
"""Share of the free memory that the embedded engine takes (`services/engine/decoder.py`)."""


@dataclass(frozen=True)
class CacheShape:
    """The layers of a model that keep something of a sequence."""

    attention_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_layers: int = 0
    channels: int = 0
    """Channels of the convolution of a linear layer."""
    kernel: int = 1
    """Inputs that the convolution reads for a token."""
    state: int = 0
    """Numbers of the recurrent state of a linear layer."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "CacheShape":
        """Reads a model's `config.json`. Raises ConfigError for an unknown architecture."""
        kind = config.get("model_type")
        known = (*KNOWN, *_STATES, *_CONVOLUTIONS)
        if kind not in known:
            raise ConfigError(
                "the cache that an engine needs for a sequence of this architecture cannot be "
                "estimated",
                field="model_type",
                value=kind,
                remedy=f"the known architectures are {', '.join(known)}",
            )
        try:
            return cls._read(config)
        except KeyError as error:
            raise incomplete(error) from None

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> "CacheShape":
        kind = config["model_type"]
        heads = config["num_attention_heads"]
        layers = _kinds_of_layers(config)
        channels = 0
        kernel = 1
        state = 0
        if kind in _CONVOLUTIONS:
            channels = config["hidden_size"]
            kernel = config["conv_L_cache"]
        elif kind in _STATES:
            values = [config[name] for name in _STATES[kind]]
            own, width, groups, group_width, kernel = values
            if width == "auto":
                inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
                width = inner // own
            channels = own * width + 2 * groups * group_width
            state = own * width * group_width
        return cls(
            attention_layers=sum(layer in _ATTENTION for layer in layers),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            linear_layers=sum(layer in _LINEAR for layer in layers),
            channels=channels,
            kernel=kernel,
            state=state,
        )

    def token_bytes(self, width: int, gpus: int = 1) -> int:
        """Returns the bytes of the keys and values of a token on each of an engine's GPUs, at
        `width` bytes per number.
        """
        kv_heads = max(1, self.kv_heads // gpus)  # a KV head cannot be split
        return 2 * width * self.attention_layers * self.head_dim * kv_heads

    def state_bytes(self, inputs: int, width: int, gpus: int = 1) -> int:
        """Returns the bytes of the states of a sequence, with `inputs` inputs of each convolution
        at `width` bytes per number.
        """
        of_layer = width * self.channels * inputs + _STATE_BYTES * self.state
        return self.linear_layers * of_layer // gpus


def _kinds_of_layers(config: Mapping[str, Any]) -> list[str]:
    """Returns the kind of every layer, as the hub's files or those of transformers tell it."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.get(name):
            return list(config[name])
    kind = config["model_type"]
    count = config["num_hidden_layers"]
    if kind == "falcon_h1":
        return ["hybrid"] * count
    if kind in KNOWN:
        return ["full_attention"] * count
    every = config.get("full_attention_interval", 4)
    attend = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    if attend is None:
        attend = range(every - 1, count, every)
    return ["attention" if number in attend else "mamba" for number in range(count)]


@dataclass(frozen=True)
class EngineMemoryEstimate:
    """Memory in bytes of each of the `rollout.tensor_parallel_size` GPUs of an engine, which hold
    equal shares.
    """

    weights: int
    kv_bytes_per_token: int
    kv_tokens: int
    """Capacity for keys and values, in tokens; 0 when not even the weights fit."""
    state_bytes: int = 0
    """What the linear layers keep of one sequence."""
    sequences: int | None = None
    """How many sequences the room for states lets run; None without states."""

    def completions(self, tokens: int) -> int:
        """Returns how many completions of `tokens` tokens, with their prompts, run at once."""
        if self.sequences is None:
            return self.kv_tokens // tokens
        return min(self.sequences, self.kv_tokens // tokens)


def engine_memory(
    cache: CacheShape, weights: int, config: Config, gpu_bytes: int, static_share: float = 0.85
) -> EngineMemoryEstimate:
    """Estimates what an engine keeps on a GPU. SGLang takes `static_share` of it
    (`--mem-fraction-static`) for its weights, of `weights` bytes in all, and for sequences.

    Raises ConfigError when `rollout.tensor_parallel_size` does not divide the heads.
    """
    size = config.rollout.tensor_parallel_size
    width = number_bytes(config)
    if cache.heads % size:
        raise ConfigError(
            f"the model's {cache.heads} attention heads cannot be divided among {size} GPUs",
            field="rollout.tensor_parallel_size",
            value=size,
            remedy=f"use a divisor of {cache.heads}",
        )
    of_gpu = weights // size
    of_token = cache.token_bytes(width, size)
    if config.rollout.engine == "embedded":
        columns = config.rollout.max_context_tokens
        states = cache.state_bytes(cache.kernel, width)
        room = max(0, gpu_bytes - of_gpu)
        rows = int(_EMBEDDED_SHARE * room) // (of_token * columns + states)
        rows = min(rows, config.rollout.max_running_requests)
        return EngineMemoryEstimate(
            of_gpu, of_token, rows * columns, state_bytes=states, sequences=rows
        )

    room = max(0, int(static_share * gpu_bytes) - of_gpu)
    if not cache.linear_layers:
        return EngineMemoryEstimate(of_gpu, of_token, room // of_token)
    states = cache.state_bytes(cache.kernel - 1, _CONV_BYTES, size)
    for_states = int(_STATES_SHARE * room)
    sequences = max(0, for_states // states - 1) // _STATES_OF_REQUEST
    return EngineMemoryEstimate(
        of_gpu,
        of_token,
        (room - for_states) // of_token,
        state_bytes=states,
        sequences=sequences,
    )
