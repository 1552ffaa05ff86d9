"""Estimates the time of an update on an H100 from the bytes and FLOPs of every operation on fake
tensors, and compares the estimate with published runs.

    python -m benchmarks.roofline            # our updates
    python -m benchmarks.roofline --anchors  # published runs of other trainers

One decoder layer of transformers runs forward and backward on tensors without contents, at full
size and with the packed layout of `--tokens` prompt and completion tokens. In eager mode, every
torch operation is a kernel that reads its inputs and writes its outputs; when compiled, a kernel is
whatever Inductor's scheduler fuses. Head, optimiser and FSDP are counted by hand, from
`trainer/policy/logprobs.py` and torch. A kernel takes as long as its bytes or its FLOPs at the
speed that was measured for its shape (`benchmarks/h100.py`), whichever is longer, and at least 4 µs
in eager mode. Weights and gradients travel between GPUs while they compute, and take the time by
which this is longer; the experts' tokens travel while they wait.

The sum of the kernels is a lower bound. `--anchors` counts published runs in the same way; what
they took beyond it is the median `BEYOND` by which the times of our updates are multiplied. MFU
counts the same as `benchmarks.update`: 6 FLOPs per parameter and token (the head for completion
tokens only), and the attention.

This is a prediction; nothing ran on a GPU.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.command import command_parser, figures_table
from benchmarks.h100 import LINK, PEAK, attention_share, gemm_share
from benchmarks.rehearsal import Cost, kernel_flops, kernel_tensors, product_share, touched
from benchmarks.update import SHAPES
from common.models.memory import FITS_SHARE, ModelShape, fastest_fit, sums_once
from common.settings.config import load
from common.settings.sections import TrainerSection
from learning import attention, sharding
from learning.experts import expert_modules
from learning.layout import Packed, layout_for

BEYOND = 1.33
"""What a published run takes, as a multiple of the sum of its kernels: the median of
`--anchors`."""
_GPU_BYTES = 80e9
_LONG = {"max_position_embeddings": 131_072}
_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True} | _LONG
_QWEN2 = {"vocab_size": 152_064, "tie_word_embeddings": False} | _LONG
MODELS: dict[str, tuple[Any, int]] = {
    "0.5B": (
        Qwen2Config(**SHAPES["0.5b"], num_key_value_heads=2, tie_word_embeddings=True, **_LONG),
        1,
    ),
    "0.6B": (
        Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            **_QWEN3,
        ),
        1,
    ),
    "1.5B": (
        Qwen2Config(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            **(_QWEN2 | {"vocab_size": 151_936, "tie_word_embeddings": True}),
        ),
        1,
    ),
    "4B": (
        Qwen3Config(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            **_QWEN3,
        ),
        8,
    ),
    "7B": (
        Qwen2Config(
            hidden_size=3584,
            intermediate_size=18_944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            **_QWEN2,
        ),
        8,
    ),
    "8B": (
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128_256,
            tie_word_embeddings=False,
            **_LONG,
        ),
        8,
    ),
    "30B-A3B": (
        Qwen3MoeConfig(
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            **(_QWEN3 | {"tie_word_embeddings": False}),
        ),
        8,
    ),
}
"""The models, and the number of GPUs that shard each."""
_LLAMA_7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32_000,
    tie_word_embeddings=False,
    **_LONG,
)


def _mpt(hidden: int, layers: int, heads: int) -> Any:
    """Returns a model with the products of MosaicML's MPT, whose MLP has two matrices of four times
    the width instead of three.
    """
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=50_432,
        tie_word_embeddings=True,
        **_LONG,
    )


HeadKind = Literal["fused", "logits", "cross_entropy"]


class Eager(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for mypy here
    """Counts every operation except attention as a separate kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = kernel_tensors(func, args, kwargs, result)
        is_attention = "attn" in str(func) or "attention" in str(func)
        if tensors and not is_attention:
            flops = kernel_flops(func, args, kwargs or {}, result)
            share = product_share(result.shape, flops) if flops else 1.0
            self.cost.add(touched(tensors), flops, share=share)
        return result


@contextmanager
def compiled(forward_passes: int) -> Iterator[Cost]:
    """Makes `torch.compile` count Inductor's fused kernels instead of generating code."""
    # Inductor takes two seconds to import, which the eager count does not need.
    from torch._inductor.compile_fx import compile_fx, record_original_output_strides
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    cost = Cost()

    def count(graph_module: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        record_original_output_strides(graph_module)
        graph = GraphLowering(graph_module)
        times = 1 if options.get("is_backward") else forward_passes
        with (
            V.set_fake_mode(detect_fake_mode(inputs)),
            V.set_graph_handler(graph),
            V.set_debug_handler(DebugContext()),
        ):
            graph.run(*inputs)
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                origins = [
                    str(origin.target)
                    for origin in (node.node.origins if node.node is not None else ())
                ]
                if not any("varlen" in origin for origin in origins):
                    flops = node.estimate_flops() or 0
                    sizes = [int(size) for size in node.node.get_size()] if flops else []
                    cost.add(
                        node.get_read_write_buffers_sizes(),
                        flops,
                        launch=0.0,
                        times=times,
                        share=product_share(sizes, flops),
                    )
        return make_boxed_func(graph_module.forward)  # type: ignore[no-any-return]

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=count)

    real = torch.compile
    with patch.object(
        torch,
        "compile",
        lambda function, **_options: real(function, backend=backend, dynamic=False),
    ):
        yield cost


def head_cost(tokens: int, width: int, vocabulary: int, kind: HeadKind) -> Cost:
    """Counts the head, forward and backward, for this many completion tokens.

    `fused` counts the kernels of `trainer/policy/fused_head.py`; `logits` torch's operators on 256
    MiB of logits at a time, rounded to bfloat16; `cross_entropy` all logits at once, in float32.
    """
    cost = Cost()
    logits = tokens * vocabulary
    weight = vocabulary * width
    product = 2.0 * logits * width
    by_token = gemm_share(tokens, vocabulary, width)
    of_states = gemm_share(tokens, width, vocabulary)
    of_weights = gemm_share(vocabulary, width, tokens)
    if kind == "cross_entropy":
        cost.add(2 * logits + 2 * weight, product, share=by_token)
        # To float32; log-softmax; its gradient; back to bfloat16.
        for size in (2 + 4, 4 + 4, 4 + 4, 4 + 2):
            cost.add(size * logits)
        cost.add(2 * logits + 2 * weight, product, share=of_states)
        cost.add(2 * logits + 8 * weight, product, share=of_weights)
        return cost

    if kind == "fused":
        parts = math.ceil(4 * logits / (1 << 30))
        for size in (4, 4, 2):  # statistics: read; gradient: read and write
            cost.add(size * logits)
        moved = (4 * logits + 2 * weight * parts) / parts
        cost.add(moved, product / parts, times=parts, share=by_token)
        cost.add(2 * logits + 2 * weight, product, share=of_states)
        cost.add(2 * logits + 8 * weight, product, share=of_weights)
        return cost

    parts = math.ceil(4 * logits / (256 << 20))
    moved = (2 * logits + 2 * weight * parts) / parts
    for _ in range(2):  # forward, and again in the backward pass
        cost.add(moved, product / parts, times=parts, share=by_token)
        cost.add((2 + 4) * logits / parts, times=parts)  # to float32
        cost.add((4 + 4) * logits / parts, times=parts)  # log_softmax
        cost.add((4 + 4) * logits / parts, times=parts)  # exp
    # Entropy: multiply by p in place, then sum.
    cost.add((4 + 4 + 4 + 4) * logits / parts, times=parts)
    cost.add((4 + 2) * logits / parts, times=parts)  # to bfloat16
    cost.add(moved, product / parts, times=parts, share=of_states)
    of_part = gemm_share(vocabulary, width, tokens / parts)
    cost.add(moved, product / parts, times=parts, share=of_part)
    # The gradient of the weights, accumulated in float32.
    cost.add((2 + 4 + 4) * weight, times=parts)
    return cost


def attention_pairs(prompts: list[Any], completions: list[Any]) -> float:
    """Returns the number of token pairs that attend to each other in the packed layout."""
    pairs = 0.0
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if i == 0 or prompt is not prompts[i - 1]:
            pairs += len(prompt) ** 2 / 2
        pairs += (len(completion) - 1) * (len(prompt) + len(completion) / 2)
    return pairs


@dataclass(frozen=True)
class Variant:
    """How an update is computed."""

    name: str
    settings: TrainerSection
    sharded: bool
    head: HeadKind = "fused"
    flash: Literal["2", "3"] = "2"
    gathers_once: bool = False
    """Whether sharded weights stay gathered until the end of an update."""
    expert_ranks: int = 1
    """How many ranks share out the experts of a layer."""
    tokens: int | None = None
    """Tokens of a micro-batch; None: those that are compared."""


Rows = tuple[list[Any], list[Any]]
"""Prompts and completions."""


def predicted(
    config: Any, ranks: int, rows: Rows, variant: Variant, *, micro_batches: int = 2
) -> dict[str, float]:
    """Returns the seconds of the kernels of a micro-batch by part, their sum, and its FLOPs."""
    prompts, completions = rows
    layout = Packed.of(prompts, completions)
    length = layout.input_ids.shape[1]
    scored = len(layout.predicts)
    layers = config.num_hidden_layers
    width = config.hidden_size
    head_size = getattr(config, "head_dim", None) or width // config.num_attention_heads
    one = config.__class__(
        **{**config.to_dict(), "num_hidden_layers": 1, "layer_types": None, "vocab_size": 100}
    )
    layer = layer_cost(one, layout, variant.settings, variant.expert_ranks)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(one).model
        layer_size = sum(p.numel() for p in model.layers.parameters())
        experts = sum(p.numel() for module in expert_modules(model) for p in module.parameters())
    used_size = layer_size
    if experts:
        used_size -= experts - experts * config.num_experts_per_tok // config.num_experts
    matrix = config.vocab_size * width
    outer = matrix * (1 if config.tie_word_embeddings else 2)
    parameters = layers * layer_size + outer
    # Those that a rank has while it computes, when others have some of the experts.
    held = parameters - layers * (experts - experts // variant.expert_ranks)
    pairs = attention_pairs(prompts, completions)
    attention_flops = 4.0 * config.num_attention_heads * head_size * pairs
    mean_length = 2 * pairs / length

    def speed(backward: bool) -> float:
        return attention_share(variant.flash, head_size, mean_length, backward=backward)

    attend = Cost()
    again = variant.settings.activation_checkpointing is True
    attend.add(0, attention_flops * (1 + again), times=layers, share=speed(backward=False))
    attend.add(0, 2.5 * attention_flops, times=layers, share=speed(backward=True))

    copies = Cost()
    gathers = 2.0
    if variant.gathers_once:
        gathers = 1.0 / micro_batches
    if variant.sharded:
        # A rank casts its share, copies the gathered weights, and copies, casts and adds gradients.
        copies.add((4 + 2) / ranks * parameters + 4 * held, times=gathers)
        copies.add((2 + 4) * held + (12 + (8 if ranks == 1 else 0)) / ranks * parameters)
    else:  # autocast casts once; gradients are cast and added
        copies.add((4 + 2) * parameters)
        copies.add((2 + 4 + 12) * parameters)
    copies.add(16 * matrix)  # the gradient of the embedding
    optimizer = Cost()
    optimizer.add(40 * parameters / ranks / micro_batches)

    parts = {
        "layers": layers * layer.seconds,
        "attention": attend.seconds,
        "head": head_cost(scored, width, config.vocab_size, variant.head).seconds,
        "copies": copies.seconds,
        "AdamW": optimizer.seconds,
    }
    if variant.sharded and ranks > 1:
        gathered = held
        if variant.expert_ranks == ranks:  # nobody else has a rank's experts
            gathered -= layers * experts // ranks
        sums = 1.0 / micro_batches if sums_once(parameters, ranks) else 1.0
        moved = (2 * gathers + 4 * sums) * gathered * (ranks - 1) / ranks
        exchanged = layers * exchange_bytes(config, length, variant)
        computing = sum(parts.values())
        parts["transfers"] = max(0.0, moved / LINK - computing) + exchanged / LINK
    flops = 6.0 * layers * used_size * length + 6.0 * matrix * scored + 3 * layers * attention_flops
    return parts | {"total": sum(parts.values()), "flops": flops, "tokens": float(length)}


def exchange_bytes(config: Any, tokens: int, variant: Variant) -> float:
    """Returns the bytes that a rank sends for the experts of a layer: each token once to every
    other rank that owns one of its experts, and their sum back, in every pass.
    """
    ranks = variant.expert_ranks
    if ranks == 1:
        return 0.0
    visits = (ranks - 1) * (1 - (1 - 1 / ranks) ** config.num_experts_per_tok)
    passes = 3 if variant.settings.activation_checkpointing is True else 2
    sent: float = passes * tokens * visits * 2 * 2 * config.hidden_size
    return sent


def mfu(found: dict[str, float]) -> float:
    """Returns the MFU of a micro-batch that takes `BEYOND` times its kernels."""
    return found["flops"] / (BEYOND * found["total"]) / PEAK


def groups(tokens: int, *, prompt: int = 200, completion: int = 400, size: int = 8) -> Rows:
    """Returns prompts and completions of about `tokens` tokens, with heavy-tailed lengths as in
    `benchmarks.update`.
    """
    rng = np.random.default_rng(0)
    total = 0
    prompts: list[Any] = []
    completions: list[Any] = []
    while True:
        ids = rng.integers(0, 1000, prompt).astype(np.int32)
        lengths = np.clip(
            (rng.lognormal(-0.32, 0.8, size) * completion).astype(int), 16, 8 * completion
        )
        if total + prompt + (lengths - 1).sum() > tokens:
            return prompts, completions
        total += prompt + int((lengths - 1).sum())
        prompts += [ids] * size
        completions += [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]


def whole_rows(tokens: int, count: int = 1) -> Rows:
    """Returns `count` rows of `tokens` tokens."""
    prompts = [np.zeros(1, np.int32) for _ in range(count)]
    completions = [np.zeros(tokens, np.int32) for _ in range(count)]
    return prompts, completions


def divided_experts_cost(experts: Any, tokens: int, config: Any, ranks: int, passes: int) -> Cost:
    """Counts the experts of one of `ranks` ranks, forward and backward, for as many tokens as every
    rank has, evenly routed: those of a module, uncompiled, and what `learning.experts` does around
    it.
    """
    width = config.hidden_size
    chosen = config.num_experts_per_tok
    arrived = round(tokens * ranks * (1 - (1 - 1 / ranks) ** chosen))
    pairs = tokens * chosen
    experts.num_experts //= ranks
    for name, parameter in list(experts.named_parameters()):
        own = parameter[: experts.num_experts].detach()
        setattr(experts, name, torch.nn.Parameter(torch.empty_like(own)))
    rows = torch.empty(pairs, width, dtype=torch.bfloat16, requires_grad=True)
    index = torch.empty(pairs, 1, dtype=torch.int64)
    weights = torch.empty(pairs, 1, dtype=torch.bfloat16)

    cost = Cost()
    for _ in range(passes - 2):
        with Eager() as forward:
            experts(rows, index, weights)
        cost += forward.cost
    with Eager() as both:
        experts(rows, index, weights).backward(torch.empty_like(rows))
    cost += both.cost
    for _ in range(passes):
        # Tokens are taken for the ranks, and there for every expert; sums are made in float32.
        cost.add((2 + 2) * (arrived + pairs) * width)
        cost.add((2 + 4 + 4 + 4 + 4) * (arrived + pairs) * width)
    return cost


def layer_cost(
    config: Any, layout: Packed, settings: TrainerSection, expert_ranks: int = 1
) -> Cost:
    """Counts one decoder layer, forward and backward, in bfloat16, with its experts shared out
    among `expert_ranks` ranks.
    """
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    layout_for(model, "on")
    layer = model.model.layers[0].train()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        compiled(1 + (settings.activation_checkpointing is True)) as fused,
    ):
        sharding.prepare(model, settings, trained=True, device=torch.device("cpu"))
        layer.to_empty(device="cpu")
        length = layout.input_ids.shape[1]
        exchanged = Cost()
        if expert_ranks > 1:
            passes = 3 if settings.activation_checkpointing is True else 2
            for module in expert_modules(model):
                exchanged += divided_experts_cost(
                    module, length, config, ranks=expert_ranks, passes=passes
                )
                # The compiled layer goes around it.
                module.forward = _no_experts
        states = torch.empty(
            1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
        )
        head_size = getattr(config, "head_dim", None)
        head_size = head_size or config.hidden_size // config.num_attention_heads
        cos = torch.empty(1, length, head_size, dtype=torch.bfloat16)
        fake: dict[str, Any] = {}
        for field in fields(layout.segments):
            value = getattr(layout.segments, field.name)
            if isinstance(value, Tensor):
                fake[field.name] = torch.empty_like(value)
        segments = replace(layout.segments, **fake)
        options = {
            "attention_mask": segments.mask,
            "position_embeddings": (cos, cos),
            "segments": segments,
        }
        if settings.compile:
            torch._dynamo.reset()  # else it compiles only the first few models of a process
            layer.forward(states, **options).backward(torch.empty_like(states))
            assert fused.calls, "Inductor has compiled nothing"
            fused += exchanged
            return fused
        with Eager() as eager:
            layer.forward(states, **options).backward(torch.empty_like(states))
        counted: Cost = eager.cost
        counted += exchanged
        return counted


def _no_experts(states: Tensor, _index: Tensor, weights: Tensor) -> Tensor:
    return states * weights[:, :1]


def mixture_variants(config: Any, ranks: int) -> list[Variant]:
    """Returns what the settings decide by themselves for a mixture on 80 GB, whose passes are as
    large as fits: with all experts gathered, and shared out among all ranks, without and with
    moments in bfloat16.
    """
    shape = ModelShape.of(config.to_dict())
    found = []
    for expert_ranks, moments in product((1, ranks), ("float32", "bfloat16")):
        words = ["--parallel.expert_size", str(expert_ranks), "--optimizer.moments", moments]
        decided = fastest_fit(shape, load(words, {}), ranks, FITS_SHARE * _GPU_BYTES)
        settings = decided.trainer.model_copy(update={"compile": True})
        kind = str(settings.activation_checkpointing).lower()
        name = f"auto: {kind}, {settings.pass_tokens} tokens, expert_size {expert_ranks}, {moments}"
        found.append(
            Variant(
                name,
                settings,
                sharded=True,
                gathers_once=decided.parallel.reshard_after_forward is False,
                expert_ranks=expert_ranks,
                tokens=settings.pass_tokens,
            )
        )
    return found


def variants(model: str, tokens: int) -> list[Variant]:
    """Returns the variants to compare: without what was done for speed, every kind of activation
    checkpointing, and last what the settings decide by themselves on 80 GB.
    """
    config, ranks = MODELS[model]
    if ModelShape.of(config.to_dict()).experts:
        return mixture_variants(config, ranks)
    sharded = ranks > 1
    eager = TrainerSection(compile=False, activation_checkpointing=True)
    found = [Variant("eager, torch's head, recomputed", eager, sharded, "logits")]
    kinds: dict[str, bool | Literal["selective"]] = {
        "recomputed": True,
        "selective": "selective",
        "kept": False,
    }
    for name, checkpointing in kinds.items():
        settings = TrainerSection(compile=True, activation_checkpointing=checkpointing)
        found.append(Variant(name, settings, sharded))

    run = load(["--trainer.micro_batch_tokens", str(tokens)], {})
    shape = ModelShape.of(config.to_dict())
    decided = fastest_fit(shape, run, ranks, FITS_SHARE * _GPU_BYTES)
    settings = decided.trainer.model_copy(update={"compile": True})
    gathers_once = decided.parallel.reshard_after_forward is False
    return [*found, Variant("auto", settings, sharded, gathers_once=gathers_once)]


@dataclass(frozen=True)
class Anchor:
    """A published run."""

    name: str
    source: str
    config: Any
    ranks: int
    rows: Rows
    variant: Variant
    seconds: float
    """What a micro-batch took on one GPU, as published."""
    micro_batches: int = 2

    def kernels(self) -> dict[str, float]:
        """Returns what is predicted for its kernels."""
        return predicted(
            self.config, self.ranks, self.rows, self.variant, micro_batches=self.micro_batches
        )


def anchors() -> list[Anchor]:
    """Returns the published runs, with what their trainers are known to do."""
    recomputed = TrainerSection(compile=False, activation_checkpointing=True)
    kept = TrainerSection(compile=True, activation_checkpointing=False)
    sft = Variant("", recomputed, True, "cross_entropy", "3")
    rl = Variant("", recomputed, True, "logits", "3")
    compiled_7b = Variant("", kept, True, "cross_entropy", "2")
    small, _ = MODELS["0.6B"]
    middle, _ = MODELS["4B"]
    prime = "prime-rl, benchmarks/baselines"
    mosaic = "llm-foundry, scripts/train/benchmarking"
    # MPT's norms and GELU are one kernel each, as compiled ones are.
    mpt = Variant("", kept, True, "cross_entropy", "2")
    # Seconds of prime-rl: `step_time` of two micro-batches, without the time in which weights are
    # written, which its MFU includes.
    return [
        Anchor("SFT 0.6B × 1, 8k", prime, small, 1, whole_rows(8192), sft, 8192 / 26_010),
        Anchor("SFT 0.6B × 1, 16k", prime, small, 1, whole_rows(16_384), sft, 1.2819 / 2),
        Anchor("RL 0.6B × 1, 16k", prime, small, 1, whole_rows(16_384), rl, 1.9923 / 2),
        Anchor("RL 0.6B × 1, 64k", prime, small, 1, whole_rows(65_536), rl, 12.1756 / 2),
        Anchor("RL 4B × 8, 16k", prime, middle, 8, whole_rows(16_384), rl, 4.6877 / 2),
        Anchor("RL 4B × 8, 64k", prime, middle, 8, whole_rows(65_536), rl, 30.2863 / 2),
        Anchor(
            "MPT 1.3B × 8, 14 × 2k",
            mosaic,
            _mpt(2048, layers=24, heads=16),
            8,
            whole_rows(2048, 14),
            mpt,
            14 * 2048 / 45_455,
            1,
        ),
        Anchor(
            "MPT 2.7B × 16, 10 × 2k",
            mosaic,
            _mpt(2560, layers=32, heads=20),
            16,
            whole_rows(2048, 10),
            mpt,
            10 * 2048 / 24_142,
            3,
        ),
        Anchor(
            "MPT 6.7B × 8, 6 × 2k",
            mosaic,
            _mpt(4096, layers=32, heads=32),
            8,
            whole_rows(2048, 6),
            mpt,
            6 * 2048 / 10_643,
            1,
        ),
        Anchor(
            "Llama 6.7B × 96, 2 × 4k",
            "foundation-model-stack/fms-fsdp",
            _LLAMA_7B,
            96,
            whole_rows(4096, 2),
            compiled_7b,
            2 * 4096 / 7500,
            1,
        ),
    ]


def main() -> None:
    """Prints the table."""
    parser = command_parser("benchmarks.roofline", __doc__)
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="prompt and completion tokens of a micro-batch"
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--anchors", action="store_true", help="published runs instead of ours")
    arguments = parser.parse_args()
    with patch.object(attention, "_has_kernel", lambda _query: True):
        table = _of_anchors() if arguments.anchors else _of_ours(arguments.models, arguments.tokens)
    Console(width=150).print(table)


_PARTS = ("layers", "attention", "head", "copies", "AdamW", "transfers", "total")


def _of_ours(models: list[str], tokens: int) -> Any:
    table = figures_table(
        f"predicted, not run: milliseconds of the kernels of a micro-batch of {tokens:,} tokens "
        f"on an H100, and the MFU when it takes {BEYOND} times their sum",
        ["model", "variant", *_PARTS, "MFU"],
        text_columns=2,
    )
    for model in models:
        config, ranks = MODELS[model]
        for variant in variants(model, tokens):
            # Small passes do not hold a group of eight.
            rows = groups(variant.tokens, size=2) if variant.tokens else groups(tokens)
            found = predicted(config, ranks, rows, variant)
            cells = [f"{1e3 * found.get(name, 0.0):.1f}" for name in _PARTS]
            settings = variant.settings
            name = variant.name
            if name == "auto":
                kind = str(settings.activation_checkpointing).lower()
                gathered = "once" if variant.gathers_once else "again"
                name = f"auto: {kind}, gathered {gathered}"
            table.add_row(f"{model} × {ranks}", name, *cells, f"{100 * mfu(found):.0f} %")
        table.add_section()
    return table


def _of_anchors() -> Any:
    table = figures_table(
        "published runs: seconds of a micro-batch, beside the sum of its kernels",
        ["run", *_PARTS, "published", "of the sum", "predicted", "error"],
    )
    found = []
    for anchor in anchors():
        cost = anchor.kernels()
        ratio = anchor.seconds / cost["total"]
        found.append(ratio)
        cells = [f"{cost.get(name, 0.0):.3f}" for name in _PARTS]
        guess = BEYOND * cost["total"]
        table.add_row(
            anchor.name,
            *cells,
            f"{anchor.seconds:.3f}",
            f"{ratio:.2f}",
            f"{guess:.3f}",
            f"{guess / anchor.seconds - 1:+.0%}",
        )
    table.caption = f"median {np.median(found):.2f}"
    return table


if __name__ == "__main__":
    main()
