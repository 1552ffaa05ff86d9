"""Estimates the minimum time of an update on an H100 from the bytes and FLOPs of every operation on
fake tensors.

    python -m benchmarks.roofline

One decoder layer of transformers runs forward and backward on tensors without contents, at full
size and with the packed layout of `--tokens` prompt and completion tokens. In eager mode, every
torch operation is a kernel that reads its inputs and writes its outputs; when compiled, a kernel is
whatever Inductor's scheduler fuses. Head, optimiser and FSDP are counted by hand, from
`trainer/policy/logprobs.py` and torch. A kernel takes as long as its bytes at 3 TB/s or its FLOPs
at 70 % of 989 TFLOP/s, whichever is longer, and at least 4 µs in eager mode. Transfers between GPUs
are assumed to be hidden behind computation. MFU counts the same as `benchmarks.update`: 6 FLOPs per
parameter and token (the head for completion tokens only), and the attention.

This is a prediction; nothing ran on a GPU.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.command import command_parser, figures_table
from benchmarks.rehearsal import PEAK, Cost, kernel_flops, kernel_tensors, touched
from benchmarks.update import SHAPES
from common.settings.sections import TrainerSection
from learning import attention, sharding
from learning.layout import Packed, layout_for

FLASH = {"2": 0.35, "3": 0.65}
"""Share of the peak that each FlashAttention generation reaches on Hopper, according to its
paper."""
SHAPE_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}


class Eager(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for mypy here
    """Counts every operation except attention as a separate kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = kernel_tensors(func, args, kwargs, result)
        if tensors and "varlen" not in str(func):
            self.cost.add(touched(tensors), kernel_flops(func, args, kwargs or {}, result))
        return result


@contextmanager
def compiled(forward_passes: int) -> Iterator[Cost]:
    """Makes `torch.compile` count Inductor's fused kernels instead of generating code."""
    from torch._inductor.compile_fx import compile_fx, record_original_output_strides

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
                    cost.add(
                        node.get_read_write_buffers_sizes(),
                        node.estimate_flops() or 0,
                        launch=0.0,
                        times=times,
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


def head_cost(tokens: int, width: int, vocabulary: int, fused: bool) -> Cost:
    """Counts the head, forward and backward, for this many completion tokens.

    `fused` counts the kernels of `trainer/policy/fused_head.py`; otherwise torch's operators on 256
    MiB of logits at a time, rounded to bfloat16.
    """
    cost = Cost()
    logits = tokens * vocabulary
    weight = vocabulary * width
    product = 2.0 * logits * width
    parts = math.ceil(4 * logits / ((1 << 30) if fused else (256 << 20)))
    for size in (4, 4, 2) if fused else ():  # statistics: read; gradient: read and write
        cost.add(size * logits)
    if fused:  # logits, gradient of the states, gradient of the weights
        cost.add((4 * logits + 2 * weight * parts) / parts, product / parts, times=parts)
        cost.add(2 * logits + 2 * weight, product)
        cost.add(2 * logits + 8 * weight, product)
        return cost
    for _ in range(2):  # forward, and again in the backward pass
        cost.add((2 * logits + 2 * weight * parts) / parts, product / parts, times=parts)
        cost.add((2 + 4) * logits / parts, times=parts)  # to float32
        cost.add((4 + 4) * logits / parts, times=parts)  # log_softmax
        cost.add((4 + 4) * logits / parts, times=parts)  # exp
    cost.add(
        (4 + 4 + 4 + 4) * logits / parts, times=parts
    )  # entropy: multiply by p in place, then sum
    cost.add((4 + 2) * logits / parts, times=parts)  # to bfloat16
    cost.add((2 * logits + 2 * weight * parts) / parts, product / parts, times=parts)
    cost.add((2 * logits + 2 * weight * parts) / parts, product / parts, times=parts)
    cost.add(
        (2 + 4 + 4) * weight, times=parts
    )  # the gradient of the weights, accumulated in float32
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
    """One row of the table."""

    name: str
    settings: TrainerSection
    sharded: bool
    fused_head: bool


def predicted(
    config: Any, ranks: int, tokens: int, variant: Variant, micro_batches: int = 2
) -> dict[str, float]:
    """Returns the milliseconds of a micro-batch by part, and the MFU."""
    prompts, completions = rows(tokens, group=8, prompt=200, completion=400)
    layout = Packed.of(prompts, completions)
    length = layout.input_ids.shape[1]
    scored = len(layout.predicts)
    layers = config.num_hidden_layers
    width = config.hidden_size
    one = config.__class__(
        **{**config.to_dict(), "num_hidden_layers": 1, "layer_types": None, "vocab_size": 100}
    )
    layer = layer_cost(one, layout, variant.settings)
    with torch.device("meta"):
        layer_size = sum(p.numel() for p in Qwen2ForCausalLM(one).model.layers.parameters())
    matrix = config.vocab_size * width
    outer = matrix * (1 if config.tie_word_embeddings else 2)
    parameters = layers * layer_size + outer
    attention_flops = 4.0 * width * attention_pairs(prompts, completions)
    attend = Cost()
    copies = Cost()
    optimizer = Cost()
    again = variant.settings.activation_checkpointing is True
    attend.add(0, attention_flops * (1 + again), times=layers, share=FLASH["2"])
    attend.add(0, 2.5 * attention_flops, times=layers, share=FLASH["2"])
    if variant.sharded:
        # A rank casts its share, copies the gathered weights, and copies, casts and adds gradients.
        copies.add((4 + 2) / ranks * parameters + 4 * parameters, times=2)
        copies.add((2 + 4) * parameters + (12 + (8 if ranks == 1 else 0)) / ranks * parameters)
    else:  # autocast casts once; gradients are cast and added
        copies.add((4 + 2) * parameters)
        copies.add((2 + 4 + 12) * parameters)
    copies.add(16 * matrix)  # the gradient of the embedding
    optimizer.add(40 * parameters / ranks / micro_batches)
    parts = {
        "layers": layers * layer.seconds,
        "attention": attend.seconds,
        "head": head_cost(scored, width, config.vocab_size, variant.fused_head).seconds,
        "copies": copies.seconds,
        "AdamW": optimizer.seconds,
    }
    flops = (
        6.0 * layers * layer_size * length + 6.0 * matrix * scored + 3 * layers * attention_flops
    )
    total = sum(parts.values())
    return {name: 1e3 * seconds for name, seconds in parts.items()} | {
        "total": 1e3 * total,
        "MFU": flops / total / PEAK,
    }


def rows(tokens: int, *, group: int, prompt: int, completion: int) -> tuple[list[Any], list[Any]]:
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
            (rng.lognormal(-0.32, 0.8, group) * completion).astype(int), 16, 8 * completion
        )
        if total + prompt + (lengths - 1).sum() > tokens:
            return prompts, completions
        total += prompt + int((lengths - 1).sum())
        prompts += [ids] * group
        completions += [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]


def layer_cost(config: Any, layout: Packed, settings: TrainerSection) -> Cost:
    """Counts one decoder layer, forward and backward, in bfloat16."""
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    layout_for(model, "on")
    layer = model.model.layers[0].train()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        compiled(1 + (settings.activation_checkpointing is True)) as fused,
    ):
        sharding.prepare(model, settings, trained=True, device=torch.device("cpu"))
        layer.to_empty(device="cpu")
        length = layout.input_ids.shape[1]
        states = torch.empty(
            1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
        )
        cos = torch.empty(
            1, length, config.hidden_size // config.num_attention_heads, dtype=torch.bfloat16
        )
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
            layer.forward(states, **options).backward(torch.empty_like(states))
            return fused
        with Eager() as eager:
            layer.forward(states, **options).backward(torch.empty_like(states))
        counted: Cost = eager.cost
        return counted


def shapes() -> dict[str, tuple[Any, int]]:
    """Returns the models and the number of GPUs that shard each."""
    tied = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    small = Qwen2Config(**SHAPES["0.5b"], **tied, max_position_embeddings=32_768)
    return {"0.5B": (small, 1), "7B": (Qwen2Config(**SHAPE_7B, max_position_embeddings=32_768), 8)}


def variants(sharded: bool) -> list[Variant]:
    """Returns the variants to compare; a model on several GPUs is checkpointed and stays
    sharded.
    """
    eager = TrainerSection(compile=False, activation_checkpointing=sharded)
    fused = TrainerSection(compile=True, activation_checkpointing=sharded)
    found = [
        Variant("before", eager, True, False),
        Variant("fused head", eager, True, True),
        Variant("fused head, compiled", fused, True, True),
    ]
    if not sharded:
        return [*found, Variant("fused head, compiled, no FSDP", fused, False, True)]
    selective = TrainerSection(compile=True, activation_checkpointing="selective")
    return [*found, Variant("fused head, compiled, selective checkpointing", selective, True, True)]


def main() -> None:
    """Prints the table."""
    parser = command_parser("roofline", __doc__)
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="prompt and completion tokens of a micro-batch"
    )
    parser.add_argument("--models", nargs="*", default=["0.5B", "7B"], choices=["0.5B", "7B"])
    arguments = parser.parse_args()
    names = ("layers", "attention", "head", "copies", "AdamW", "total")
    table = figures_table(
        "predicted, not run: milliseconds of a micro-batch on an H100",
        ["model", "variant", *names, "MFU"],
        text_columns=2,
    )
    with patch.object(attention, "_has_kernel", lambda _query: True):
        for model in arguments.models:
            config, ranks = shapes()[model]
            for variant in variants(sharded=ranks > 1):
                found = predicted(config, ranks, arguments.tokens, variant)
                cells = [f"{found[name]:.1f}" for name in names]
                mfu = f"{100 * found['MFU']:.0f} %"
                table.add_row(f"{model} × {ranks}", variant.name, *cells, mfu)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
