"""Estimates the memory of a run from the model's `config.json` and the settings, without loading anything.

Two figures: what a trainer process has on its GPU at the worst moment of an update, and what an engine has left for its KV
cache. What follows from shapes (weights, gradients, optimiser, KV cache) is exact; activations are those of transformers'
decoder layers; what torch, NCCL and CUDA take beside is a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from common.config import Config
from common.errors import ConfigError

_KNOWN = {"llama": "no", "mistral": "no", "qwen2": "qkv", "qwen3": "norm"}
"""By `model_type`, parameters of attention beside its four matrices: biases of q, k and v, or norms of q and k."""
_MASTER = 4
"""Bytes of a float32 number: weights, gradients, and each of AdamW's two moments."""
_LOGITS_BYTES = 256 << 20
"""Bytes of the float32 logits that exist at once (`trainer/policy/logprobs.py`)."""
_OVERHEAD = 3 << 30
"""CUDA context, NCCL's buffers, cuBLAS workspaces, fragments: a guess."""
_PROCESS = 4 << 30
"""Host memory of one trainer process alone, CUDA's libraries included: a guess."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder as transformers builds it: gated MLP, RMSNorm, grouped-query attention."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether the head is the embedding."""
    extra: str = "no"
    """A value of `_KNOWN`."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Reads a model's `config.json`. Raises ConfigError for an unknown architecture."""
        kind = config.get("model_type")
        if kind not in _KNOWN:
            raise ConfigError(
                "the memory of this architecture cannot be estimated",
                field="model_type",
                value=kind,
                remedy=f"known are {', '.join(_KNOWN)}",
            )
        try:
            heads = config["num_attention_heads"]
            return cls(
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocabulary=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", kind == "qwen2")),
                extra=_KNOWN[kind],
            )
        except KeyError as error:
            raise ConfigError("the model's configuration is not complete", field="config.json", value=error.args[0]) from None

    @property
    def layer_parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * queries + 2 * keys) + 3 * self.hidden * self.intermediate
        beside = {"no": 0, "qkv": queries + 2 * keys, "norm": 2 * self.head_dim}[self.extra]
        return matrices + beside + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters of embedding, head and last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def lora_parameters(self, rank: int, target_modules: list[str]) -> int:
        """Returns the parameters of an adapter on these linear layers; on every one when empty."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
            "gate_proj": self.hidden + self.intermediate,
            "up_proj": self.hidden + self.intermediate,
            "down_proj": self.intermediate + self.hidden,
        }
        return self.layers * rank * sum(size for name, size in sides.items() if not target_modules or name in target_modules)

    def activation_bytes(self, width: int) -> int:
        """Returns what one decoder layer keeps of one token for the backward pass, at `width` bytes a number.

        Of each norm: its input in float32, and its output before and after the scale. Of attention: rotated queries, keys,
        values and its result. Of the MLP: gate, activation, the other half and their product.
        """
        norms = 2 * self.hidden * (4 + 2 * width)
        attention = width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return norms + attention + 4 * width * self.intermediate


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on the GPU of one trainer process, at the worst moment of an update."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    """Weights, gradients and optimiser of a critic on the trainer's devices."""
    gathered: int
    """Gathered weights of the layers that compute, with embedding and head."""
    reducing: int
    """The largest gradient being summed over the ranks, in the precision of the pass and in float32."""
    activations: int
    logits: int
    overhead: int
    """A flat guess."""

    @property
    def held(self) -> int:
        """Bytes kept from one update to the next."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def trainer_memory(shape: ModelShape, config: Config, ranks: int, width: int | None = None) -> TrainerMemory:
    """Estimates one of `ranks` processes with a GPU each; the critic counts as a model of the policy's shape.

    `width` is the bytes of a number in a pass: those of `model.dtype` when None, 4 on a CPU. Raises ConfigError when
    `trainer.shard_size` does not divide `ranks`.
    """
    settings, lora = config.trainer, config.lora
    width = width or (2 if config.model.dtype == "bfloat16" else _MASTER)
    size = settings.shard_size or ranks
    if ranks % size:
        raise ConfigError(
            f"the {ranks} ranks cannot be divided into groups of {size}",
            field="trainer.shard_size",
            value=size,
            remedy="take a divisor of the number of ranks, or leave it unset",
        )
    sharded = settings.shard_size != 1
    trained, frozen = shape.parameters, 0
    if lora.rank:
        trained, frozen = shape.lora_parameters(lora.rank, lora.target_modules), shape.parameters
    here = 0 if settings.offload_optimizer else _MASTER * trained // size
    flat_sum = _MASTER * trained if ranks > 1 and not sharded else 0
    second_model = config.algorithm.kl_coef > 0 and (not lora.rank or config.model.reference != "")
    critic = config.algorithm.needs_critic and config.critic.location == "trainer" and not settings.offload_optimizer
    layer, outer = shape.layer_parameters, shape.outer_parameters
    if sharded:
        gathered = width * (2 * layer + outer)
        reducing = (width + _MASTER) * (0 if lora.rank else max(layer, outer))
    else:  # autocast keeps its copies of the weights until the pass ends
        gathered, reducing = width * shape.parameters if width < _MASTER else 0, 0
    layer_bytes, tokens = shape.activation_bytes(width), settings.micro_batch_tokens
    kept = shape.layers * (shape.hidden * width if settings.activation_checkpointing else layer_bytes)
    working = layer_bytes * (2 if settings.activation_checkpointing else 1)  # computed again, and its gradients
    return TrainerMemory(
        weights=here + (0 if settings.offload_optimizer else width * frozen // size),
        gradients=here + flat_sum,
        optimizer=2 * here,
        reference=_MASTER * shape.parameters // size if second_model and not settings.offload_reference else 0,
        critic=4 * _MASTER * shape.parameters // size if critic else 0,
        gathered=gathered,
        reducing=reducing,
        activations=tokens * (kept + working),
        logits=4 * min(_LOGITS_BYTES, _MASTER * tokens * shape.vocabulary),
        overhead=_OVERHEAD,
    )


def trainer_host_bytes(shape: ModelShape, config: Config, ranks: int, ranks_per_node: int) -> int:
    """Estimates the CPU memory of the trainer's first node while a checkpoint is written and weights are published.

    It holds the copy of weights and optimiser that is written, the published weights once for `weight_sync` distributed and
    once more with `max_staleness`, what is offloaded, and the processes.
    """
    trained = shape.parameters
    if config.lora.rank:
        trained = shape.lora_parameters(config.lora.rank, config.lora.target_modules)
    copies = (config.trainer.weight_sync == "distributed") + (config.trainer.max_staleness > 0)
    published = shape.parameters if not config.lora.publishes_adapter else trained
    offloaded = 4 * _MASTER * trained * ranks_per_node // (config.trainer.shard_size or ranks)
    return (
        3 * _MASTER * trained  # all of it on one node where the ranks share no disk
        + copies * 2 * published
        + (offloaded if config.trainer.offload_optimizer else 0)
        + ranks_per_node * _PROCESS
    )


@dataclass(frozen=True)
class EngineMemory:
    """Memory of each of the `rollout.tensor_parallel_size` GPUs of an engine, which hold equal shares."""

    weights: int
    kv_bytes_per_token: int
    kv_tokens: int
    """Capacity of the KV cache; 0 where not even the weights fit."""


def engine_memory(shape: ModelShape, config: Config, gpu_bytes: int, static_share: float = 0.85) -> EngineMemory:
    """Estimates what SGLang has for its KV cache on a GPU of which it takes `static_share` (`--mem-fraction-static`).

    Raises ConfigError when `rollout.tensor_parallel_size` does not divide the heads.
    """
    size, width = config.rollout.tensor_parallel_size, 2 if config.model.dtype == "bfloat16" else _MASTER
    if shape.heads % size:
        raise ConfigError(
            f"the model's {shape.heads} attention heads cannot be divided among {size} GPUs",
            field="rollout.tensor_parallel_size",
            value=size,
            remedy=f"take a divisor of {shape.heads}",
        )
    weights = width * shape.parameters // size
    per_token = 2 * width * shape.layers * shape.head_dim * max(1, shape.kv_heads // size)  # a KV head is not split
    return EngineMemory(weights, per_token, max(0, int(static_share * gpu_bytes) - weights) // per_token)
