"""Estimates the memory of a run from the model's `config.json` and the settings, without loading
anything.

The estimate is a trainer process's peak GPU memory during an update; engines are in
`common.models.cache`. What follows from shapes (weights, gradients, optimiser) is exact;
activations are those of transformers' decoder layers. `benchmarks/rehearsal.py` compares it with a
rehearsed update. The overhead of torch, NCCL and CUDA is a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from common.errors import ConfigError
from common.settings.config import Config

KNOWN = {
    "llama": "no",
    "mistral": "no",
    "phi3": "no",
    "qwen2": "qkv",
    "qwen3": "norm",
    "qwen3_moe": "norm",
    "olmo2": "whole norms",
    "gemma3_text": "four norms",
}
"""By `model_type`: what a layer has besides matrices and two norms (biases of q, k and v, norms of
q and k, or more norms)."""
_MIXTURES = ("qwen3_moe",)
"""The `model_type`s whose layers have experts in place of a dense MLP."""
_ROUTE_BYTES = 4 * 8
"""Bytes of the sorted places, as int64, of one token at one of its experts."""
_MASTER = 4
"""Bytes per float32 number: of weights, gradients, and each of AdamW's two moments."""
_LOGITS_BYTES = 1 << 30
"""Bytes of the float32 logits that exist at once (`trainer/policy/logprobs.py`)."""
_KEPT_BYTES = 5 << 30
"""Bytes up to which the gradients of all logits are kept for the backward pass."""
WHOLE_GRADIENTS_BYTES = 8 << 30
"""Up to this size, a rank keeps float32 gradients of the whole model until the last micro-batch and
reduces them once."""
FITS_SHARE = 0.9
"""Share of a GPU that an estimated update may take: the estimate knows no fragments."""
_OVERHEAD = 3 << 30
"""CUDA context, NCCL's buffers, cuBLAS workspaces, fragments: a guess."""
_PROCESS = 4 << 30
"""Host memory of one trainer process alone, CUDA's libraries included: a guess."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder as transformers builds it: gated MLP or experts, RMSNorm, grouped-query
    attention.
    """

    hidden: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether the head shares the embedding's weights."""
    extra: str = "no"
    """A value of `KNOWN`."""
    experts: int = 0
    """Experts of a layer; 0 for a dense MLP."""
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Reads a model's `config.json`. Raises ConfigError for an unknown architecture."""
        kind = config.get("model_type")
        if kind not in KNOWN:
            raise ConfigError(
                "the memory that this architecture needs cannot be estimated",
                field="model_type",
                value=kind,
                remedy=f"the known architectures are {', '.join(KNOWN)}",
            )
        mixture = kind in _MIXTURES
        if mixture and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise ConfigError(
                "the memory of a model in which only some layers have experts cannot be estimated",
                field="decoder_sparse_step",
                value=config.get("decoder_sparse_step", 1),
                remedy="watch nvidia-smi in a short run",
            )
        try:
            heads = config["num_attention_heads"]
            return cls(
                hidden=config["hidden_size"],
                intermediate=config["moe_intermediate_size" if mixture else "intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocabulary=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", kind in ("qwen2", "gemma3_text"))),
                extra=KNOWN[kind],
                # transformers 5 writes another name than the hub has.
                experts=int(config.get("num_local_experts") or config["num_experts"])
                if mixture
                else 0,
                experts_per_token=config["num_experts_per_tok"] if mixture else 0,
            )
        except KeyError as error:
            raise incomplete(error) from None

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys)
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            router = self.experts * self.hidden
            mlp = router + self.experts * mlp
        beside = {
            "no": 0,
            "qkv": queries + 2 * keys,
            "norm": 2 * self.head_dim,
            "whole norms": queries + keys,
            "four norms": 2 * (self.head_dim + self.hidden),
        }
        return attention + mlp + beside[self.extra] + 2 * self.hidden

    def gathered_parameters(self, expert_ranks: int) -> int:
        """Returns how many parameters of a decoder layer a rank gathers when `expert_ranks` ranks
        share out its experts: everything else, and the experts that the rank owns.
        """
        experts = 3 * self.experts * self.hidden * self.intermediate
        return self.layer_parameters - experts + experts // expert_ranks

    @property
    def outer_parameters(self) -> int:
        """Parameters of embedding, head and last norm."""
        embedding = self.vocabulary * self.hidden
        return embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def lora_parameters(self, rank: int, target_modules: list[str]) -> int:
        """Returns the number of parameters of an adapter on these linear layers; on all of them
        when empty.
        """
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
        }
        if not self.experts:  # these are no linear layers, and have no adapter
            for name in ("gate_proj", "up_proj", "down_proj"):
                sides[name] = self.hidden + self.intermediate
        chosen = [side for name, side in sides.items() if name in (target_modules or sides)]
        return self.layers * rank * sum(chosen)

    def activation_bytes(self, width: int, repeats_heads: bool = False) -> int:
        """Returns the bytes that one decoder layer keeps per token for the backward pass, at
        `width` bytes per number.

        For each norm: its input in float32, and its output before and after scaling, which Gemma
        does in float32. For attention: rotated queries, the result, and keys and values twice,
        because every completion has those of its prompt; with `repeats_heads`, these once for every
        query head. For the MLP: gate, activation, up projection and their product. For experts
        these of every expert that a token is sent to, with its input and its output, and the
        probabilities and places of the routing.
        """
        heads = self.head_dim * (self.heads + self.kv_heads)
        further_norms = {
            "norm": heads,
            "whole norms": heads,
            "four norms": heads + 2 * self.hidden,
        }
        normed = 2 * self.hidden + further_norms.get(self.extra, 0)
        unscaled = 4 if self.extra == "four norms" else width
        norms = normed * (4 + unscaled + width)
        kept_heads = self.heads if repeats_heads else self.kv_heads
        attention = width * self.head_dim * (2 * self.heads + 4 * kept_heads)
        return norms + attention + self._mlp_bytes(width)

    def _mlp_bytes(self, width: int) -> int:
        """Returns what `activation_bytes` counts for the MLP or the experts."""
        if not self.experts:
            return 4 * width * self.intermediate
        of_expert = width * (4 * self.intermediate + 2 * self.hidden) + _ROUTE_BYTES
        return self.experts_per_token * of_expert + (_MASTER + width) * self.experts

    def backward_bytes(self, width: int) -> int:
        """Returns the bytes per token of the gradients of a layer's states, at their largest."""
        if self.experts:
            of_expert = 2 * self.hidden + 2 * self.intermediate
            return width * (self.hidden + self.experts_per_token * of_expert)
        return width * (self.hidden + 2 * self.intermediate)

    def exchange_bytes(self, width: int) -> int:
        """Returns the bytes per token that experts on several ranks receive and send back."""
        return 2 * width * self.experts_per_token * self.hidden

    def product_bytes(self, width: int) -> int:
        """Returns the bytes per token of the results of a decoder layer's matrix products and
        attention.
        """
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads) + self.hidden
        mlp = self.hidden + 2 * self.intermediate
        if self.experts:
            mlp = self.experts + self.experts_per_token * mlp
        return width * (attention + mlp)


def incomplete(error: KeyError) -> ConfigError:
    """Returns the error for a `config.json` without this key."""
    return ConfigError(
        "the model's configuration is incomplete",
        field="config.json",
        value=error.args[0],
        remedy="restore the model's config.json",
    )


@dataclass(frozen=True)
class TrainerMemory:
    """Peak GPU memory of one trainer process during an update, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    """Weights, gradients and optimiser of the critic, if it is on the trainer's devices."""
    gathered: int
    """Gathered weights of the layers in use, with embedding and head."""
    reducing: int
    """Gradients not yet summed over the ranks, and the buffers for the reduction."""
    activations: int
    logits: int
    """Logits of some of the tokens, and the tensors derived from them."""
    overhead: int
    """A flat guess."""

    @property
    def held(self) -> int:
        """Bytes kept from one update to the next."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def group_size(config: Config, ranks: int) -> int:
    """Returns how many ranks share one copy of the model. Raises ConfigError when this does not
    divide `ranks`.
    """
    size = config.parallel.shard_size or ranks
    if ranks % size:
        raise ConfigError(
            f"the {ranks} ranks cannot be divided into groups of {size}",
            field="parallel.shard_size",
            value=size,
            remedy="use a divisor of the number of ranks, or leave it unset",
        )
    return size


def pass_tokens(config: Config) -> int:
    """Returns the tokens that one rank computes in its largest pass: `trainer.micro_batch_tokens`,
    or its part of the longest answer, which is never divided into passes.
    """
    together = config.parallel.context_size
    longest = -(-config.sampling.max_new_tokens // together)
    return max(config.trainer.pass_tokens, longest)


def trainer_memory(
    shape: ModelShape,
    config: Config,
    ranks: int,
    *,
    width: int | None = None,
    repeats_heads: bool = False,
    expert_ranks: int | None = None,
) -> TrainerMemory:
    """Estimates the memory of one of `ranks` processes with one GPU each. The critic is assumed to
    be like the policy.

    `width` is the bytes per number in a pass: None for those of `model.dtype`; 4 on a CPU.
    `repeats_heads`: the kernel of attention needs a key and value head for every query head, as
    torch's does before 2.12. `expert_ranks` share out the experts of a layer; None for as many as
    the settings say. What is `auto` counts as on a CPU: nothing is recomputed, and weights are
    gathered again. Raises ConfigError when `parallel.shard_size` does not divide `ranks`.
    """
    parallel = config.parallel
    lora = config.lora
    size = group_size(config, ranks)
    width = width or number_bytes(config)
    trained = _trained_parameters(shape, config)
    frozen = shape.parameters if lora.rank else 0
    on_gpu = not parallel.offload_optimizer
    master = _MASTER * trained // size if on_gpu else 0
    moments = state_bytes(config) - _MASTER
    whole_model = _MASTER * shape.parameters // size

    second_model = config.algorithm.kl_coef > 0 and (not lora.rank or config.model.reference != "")
    has_reference = second_model and not parallel.offload_reference
    has_critic = config.algorithm.needs_critic and on_gpu

    of_token = shape.activation_bytes(width, repeats_heads)
    expert_ranks = expert_ranks or parallel.expert_size
    if expert_ranks > 1:
        of_token += shape.exchange_bytes(width)
    peaks = _peaks(
        shape,
        config,
        ranks,
        width=width,
        trained=trained,
        layer_bytes=pass_tokens(config) * of_token,
        expert_ranks=expert_ranks,
    )
    peak = max(peaks, key=sum)
    return TrainerMemory(
        weights=master + (width * frozen // size if on_gpu else 0),
        gradients=master,
        optimizer=master * moments // _MASTER,
        reference=whole_model if has_reference else 0,
        # Weights, gradients and AdamW's two moments.
        critic=whole_model * (2 * _MASTER + moments) // _MASTER if has_critic else 0,
        **peak._asdict(),
        overhead=_OVERHEAD,
    )


def state_bytes(config: Config) -> int:
    """Returns the bytes of a trained parameter in a checkpoint: the float32 weight and AdamW's two
    moments.
    """
    moment = 2 if config.optimizer.moments == "bfloat16" else _MASTER
    return _MASTER + 2 * moment


def number_bytes(config: Config) -> int:
    """Returns the bytes of a number of `model.dtype`."""
    return 2 if config.model.dtype == "bfloat16" else _MASTER


def _trained_parameters(shape: ModelShape, config: Config) -> int:
    """Returns how many parameters are trained: those of the adapter, if there is one."""
    lora = config.lora
    if lora.rank:
        return shape.lora_parameters(lora.rank, lora.target_modules)
    return shape.parameters


class _Peak(NamedTuple):
    """Bytes in use at a moment of the backward pass; the fields are those of `TrainerMemory`."""

    gathered: int
    reducing: int
    activations: int
    logits: int


def _peaks(
    shape: ModelShape,
    config: Config,
    ranks: int,
    *,
    width: int,
    trained: int,
    layer_bytes: int,
    expert_ranks: int,
) -> list[_Peak]:
    """Returns what is in use at each possible peak.

    The peak is at one of these moments of the backward pass: in the head; in the second-last layer,
    while the gradients of the last one are reduced; or when the gradients of embedding and head are
    reduced.
    `benchmarks/rehearsal.py` shows what is allocated then.
    """
    parallel = config.parallel
    checkpointing = config.trainer.activation_checkpointing
    rounded = width < _MASTER
    sharded = parallel.shard_size != 1 and (ranks > 1 or parallel.offload_optimizer)
    layer = shape.gathered_parameters(expert_ranks)
    outer = shape.outer_parameters
    matrix = shape.vocabulary * shape.hidden
    if config.lora.rank:
        layer_gradients = trained // shape.layers
        outer_gradients = 0
        head_gradient = 0
    else:
        layer_gradients = layer
        outer_gradients = outer
        head_gradient = matrix
    tokens = pass_tokens(config)
    states = tokens * shape.hidden

    # Activations: what is kept of all layers, what the backward pass of a layer makes again.
    products = 0
    if checkpointing == "selective":
        products = tokens * shape.product_bytes(width)
    kept_of_layer = layer_bytes
    again = 0
    if checkpointing in (True, "selective"):
        kept_of_layer = states * width + products
        again = layer_bytes
    kept = shape.layers * kept_of_layer
    # Gradients of a layer's states, at its widest.
    backward = tokens * shape.backward_bytes(width)
    # The embedding's result, the last norm, the head's input and its gradient.
    ends = states * (_MASTER + 4 * width)

    # Logits, and their gradients in the precision of the pass.
    logits = min(_LOGITS_BYTES, _MASTER * tokens * shape.vocabulary)
    slopes = width * tokens * shape.vocabulary
    if slopes <= _KEPT_BYTES:
        scores = max(logits + slopes, slopes + width * head_gradient * rounded)
    else:
        scores = max(
            logits + logits * width // _MASTER + _MASTER * head_gradient,
            width * head_gradient * rounded,
        )

    # A single rank divides and copies what several ranks would send.
    copies = 3 if ranks == 1 else 1
    whole = _MASTER * trained if sums_once(trained, ranks) and sharded else 0
    if sharded:
        at_head = width * (outer + layer)
        at_layer = width * (outer + 2 * layer)
        at_end = width * outer
        if parallel.reshard_after_forward is False:
            at_head = at_layer = width * (outer + shape.layers * layer)
        layer_sum = width * (head_gradient + layer_gradients) + _MASTER * copies * layer_gradients
        last_sum = (width + _MASTER * copies + (_MASTER if whole else 0)) * outer_gradients
    else:  # autocast keeps its copies of the weights until the pass ends
        at_head = at_layer = width * trained * rounded
        at_end = 0
        layer_sum = width * layer_gradients
        last_sum = _MASTER * trained * (ranks > 1)

    return [
        _Peak(
            gathered=at_head,
            reducing=whole + _MASTER * head_gradient,
            activations=kept + ends,
            logits=scores,
        ),
        _Peak(
            gathered=at_layer,
            reducing=whole + layer_sum,
            activations=kept + again + backward,
            logits=0,
        ),
        _Peak(gathered=at_end, reducing=last_sum, activations=states * width, logits=0),
    ]


_CHECKPOINTING: dict[bool | Literal["selective"], float] = {
    False: 1.0,
    "selective": 1.01,
    True: 1.3,
}
"""Seconds of an update with each value of `trainer.activation_checkpointing`, of those in which
nothing is recomputed, as `benchmarks.roofline` predicts them."""
_FIXED_TOKENS = {False: 1200, True: 1800}
"""What a pass costs beside its tokens, in tokens, with each value of
`parallel.reshard_after_forward`: casts and copies of weights and gradients, and smaller products
(fitted to `benchmarks.roofline` for 7B in passes of 4,096 to 12,288 tokens)."""
_PASSES = range(2048, 32_768 + 1, 2048)
"""Tokens of passes that short answers fill."""
_LONG_ANSWER = 4096
"""From this length on, in tokens, answers leave much of a pass empty that is no multiple of it."""
LONG_PROMPT = 512
"""Tokens of a long prompt."""


def full_pass(config: Config, answers: int) -> int:
    """Returns the tokens that a rank computes in a pass of `answers` of the longest answers, and
    their prompt.
    """
    row_tokens = answers * config.sampling.max_new_tokens + LONG_PROMPT
    return -(-row_tokens // config.parallel.context_size)


def answers_of_pass(config: Config) -> int:
    """Returns how many of the longest answers fit a pass; 1 where an answer is longer, since it is
    never cut.
    """
    answers = 1
    while full_pass(config, answers + 1) <= config.trainer.pass_tokens:
        answers += 1
    return answers


def _passes(config: Config) -> list[int]:
    """Returns the passes among which `trainer.micro_batch_tokens` `auto` chooses."""
    if config.trainer.micro_batch_tokens != "auto":
        return [config.trainer.pass_tokens]
    longest = config.sampling.max_new_tokens
    if longest < _LONG_ANSWER:
        return list(_PASSES)
    room = _PASSES[-1] * config.parallel.context_size - LONG_PROMPT
    most = max(1, room // longest)
    return [full_pass(config, answers) for answers in range(1, most + 1)]


def fastest_fit(shape: ModelShape, config: Config, ranks: int, room: float) -> Config:
    """Returns the configuration with what is `auto` in `trainer.activation_checkpointing`,
    `parallel.reshard_after_forward` and `trainer.micro_batch_tokens` decided: as fast as an update
    in `room` bytes can be, or as small as it gets when none fits.
    """
    set_checkpointing = config.trainer.activation_checkpointing
    set_reshard = config.parallel.reshard_after_forward
    fitting: list[tuple[float, Config]] = []
    others: list[tuple[int, Config]] = []
    for checkpointing, reshard, tokens in product(_CHECKPOINTING, _FIXED_TOKENS, _passes(config)):
        if set_checkpointing not in ("auto", checkpointing):
            continue
        if set_reshard not in ("auto", reshard):
            continue
        if set_reshard == "auto" and not reshard and config.algorithm.needs_critic:
            continue  # the weights of policy and critic would be gathered at the same time
        decided = config.with_memory_use(checkpointing, reshard, tokens)
        needed = trainer_memory(shape, decided, ranks).total
        seconds = _CHECKPOINTING[checkpointing] * (
            1 + _FIXED_TOKENS[reshard] / pass_tokens(decided)
        )
        if needed <= room:
            fitting.append((seconds, decided))
        others.append((needed, decided))
    return min(fitting or others, key=itemgetter(0))[1]


def form(config: Config) -> str:
    """Returns what `fastest_fit` decides, by the names of the settings."""
    checkpointing = str(config.trainer.activation_checkpointing).lower()
    reshard = str(config.parallel.reshard_after_forward).lower()
    return (
        f"activation_checkpointing {checkpointing}, reshard_after_forward {reshard}, "
        f"micro_batch_tokens {config.trainer.micro_batch_tokens}"
    )


def sums_once(trained: int, ranks: int) -> bool:
    """Whether gradients of `trained` parameters are summed over the ranks once per update instead
    of per micro-batch.

    This saves transfers but needs memory for the whole model's gradients on every rank.
    """
    return ranks > 1 and _MASTER * trained <= WHOLE_GRADIENTS_BYTES


def trainer_host_bytes(shape: ModelShape, config: Config, ranks: int, ranks_per_node: int) -> int:
    """Estimates the CPU memory (bytes) of the trainer's first node while it writes a checkpoint and
    publishes weights.

    It holds the copy of weights and optimiser being written, one copy of the published weights for
    `weight_sync` distributed and another with `max_staleness` or `rollout.colocate`, what is
    offloaded or parked, and the processes.
    """
    lora = config.lora
    size = group_size(config, ranks)
    trained = _trained_parameters(shape, config)
    colocate = config.rollout.colocate  # never combined with staleness

    # All of it on one node if the ranks share no disk.
    checkpoint = state_bytes(config) * trained

    published = trained if lora.publishes_adapter else shape.parameters
    copies = sum(
        (config.trainer.weight_sync == "distributed", config.trainer.max_staleness > 0, colocate)
    )

    of_rank = _PROCESS
    if colocate:
        gpu = trainer_memory(shape, config, ranks)
        of_rank += gpu.weights + gpu.optimizer + gpu.reference + gpu.critic
    if config.parallel.offload_optimizer:
        # Weights, gradients and AdamW's two moments, and the frozen model of an adapter.
        frozen = shape.parameters if lora.rank else 0
        of_rank += (
            (state_bytes(config) + _MASTER) * trained + number_bytes(config) * frozen
        ) // size

    return checkpoint + copies * 2 * published + ranks_per_node * of_rank
