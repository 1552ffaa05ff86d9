"""Compares the ways to divide an update of a large model among GPUs: the memory of one of them, and
the bytes that it sends and receives.

    python -m benchmarks.parallelism

All forms shard weights, gradients and AdamW over all GPUs (FSDP). `context` C: C GPUs compute a
row together, each its part of the tokens (`parallel.context_size`, docs/adr/0065). `tensor`
T: T GPUs compute every layer together, each its heads and its part of the MLP and of the
vocabulary, with the states between them divided by tokens (sequence parallel); it is not built
(docs/adr/0070). `experts` E: E GPUs share out the experts. `offload`: weights, gradients and AdamW
are in CPU memory (`parallel.offload_optimizer`).

Memory is the estimate of `common.models.memory` with activation checkpointing, in GB of an update
with rows of this many tokens. A GPU of a tensor group has the matrices of a model with 1/T of the
heads, of the MLP and of the vocabulary, and keeps 1/T of the inputs of layers. `moved`: GB that a
GPU receives in a layer's forward pass, in bfloat16.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks.command import command_parser, figures_table
from common.models.memory import ModelShape, TrainerMemory, trainer_memory
from common.settings.config import Config, load

_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-32B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
}
"""The published shapes."""
SHAPES = {name: ModelShape.of(config) for name, config in _CONFIGS.items()}
_RUNS = {
    "Qwen2.5-32B": (16,),
    "Llama-3.1-70B": (16, 24, 32),
    "Qwen3-30B-A3B": (8,),
    "Qwen3-235B-A22B": (64,),
}
"""The models, and on how many GPUs."""
_TOKENS = (8192, 32_768, 65_536)
_BFLOAT16 = 2
_SMALLEST_PASS = 1024


@dataclass(frozen=True)
class Parallelism:
    """How many GPUs compute a row, a layer and a layer's experts together."""

    context: int = 1
    tensor: int = 1
    experts: int = 1
    offload: bool = False

    @property
    def name(self) -> str:
        parts = ["FSDP"]
        for word, size in vars(self).items():
            if size > 1:
                parts.append(f"{word} {size}")
        if self.offload:
            parts.append("offload")
        return " × ".join(parts)


DENSE = (
    Parallelism(),
    Parallelism(context=8),
    Parallelism(tensor=8),
    Parallelism(context=2, tensor=8),
    Parallelism(8, offload=True),
)
MIXTURE = (
    Parallelism(),
    Parallelism(context=8),
    Parallelism(tensor=4),
    Parallelism(context=8, experts=8),
)


def memory(shape: ModelShape, ranks: int, tokens: int, form: Parallelism) -> TrainerMemory:
    """Returns the estimate for one of `ranks` GPUs with rows of `tokens` tokens."""
    config = _config(tokens, form)
    if form.tensor == 1:
        return trainer_memory(shape, config, ranks, expert_ranks=form.experts)

    # A GPU of the group has 1/T of every matrix, which ranks / T GPUs share, and all tokens of the
    # group's part of the row.
    part = replace(
        shape,
        heads=shape.heads // form.tensor,
        kv_heads=max(1, shape.kv_heads // form.tensor),
        intermediate=shape.intermediate // form.tensor,
        vocabulary=shape.vocabulary // form.tensor,
    )
    whole = trainer_memory(part, config, ranks // form.tensor)
    inputs = shape.layers * _pass_tokens(tokens, form) * shape.hidden * _BFLOAT16
    held_elsewhere = inputs - inputs // form.tensor
    states = trainer_memory(shape, config, ranks)
    return replace(
        whole,
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=whole.activations - held_elsewhere,
    )


def moved(shape: ModelShape, ranks: int, tokens: int, form: Parallelism) -> dict[str, float]:
    """Returns the bytes that a GPU receives in a layer's forward pass, by what they are."""
    group = form.tensor
    of_line = _pass_tokens(tokens, form)
    gathered = _BFLOAT16 * shape.gathered_parameters(form.experts) / group
    found = {"weights": gathered * (1 - group / ranks)}
    # Two gathers of all tokens' states and two sums of them, each over the group.
    found["tensor"] = 4 * _BFLOAT16 * of_line * shape.hidden * (group - 1) / group
    # Queries, keys and values there, and the result back, of this GPU's tokens.
    heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim / group
    exchanged = _BFLOAT16 * of_line * heads
    found["context"] = exchanged * (form.context - 1) / form.context
    to_experts = of_line * shape.exchange_bytes(_BFLOAT16)
    found["experts"] = to_experts * (form.experts - 1) / form.experts
    return found


def _config(tokens: int, form: Parallelism) -> Config:
    options = {
        "trainer.activation_checkpointing": True,
        "trainer.micro_batch_tokens": _SMALLEST_PASS,
        "parallel.context_size": form.context,
        "parallel.offload_optimizer": form.offload,
        "sampling.max_new_tokens": tokens,
    }
    return load([word for name, value in options.items() for word in (f"--{name}", str(value))], {})


def _pass_tokens(tokens: int, form: Parallelism) -> int:
    """Returns the tokens that a GPU's matrix products see in a pass: of its part of the row."""
    return max(_SMALLEST_PASS, math.ceil(tokens / form.context))


def main() -> None:
    """Prints the table."""
    parser = command_parser("benchmarks.parallelism", __doc__)
    parser.add_argument("--models", nargs="*", default=list(_RUNS), choices=list(_RUNS))
    parser.add_argument("--gpu-memory-gb", type=float, default=80.0, metavar="GB")
    arguments = parser.parse_args()
    parts = ("states", "gathered", "reducing", "activations", "logits", "total")
    room = arguments.gpu_memory_gb
    table = figures_table(
        f"calculated: GB on each GPU in an update, and whether it fits {room:g} GB",
        ["model", "tokens", "form", *parts, "fits", "moved"],
        text_columns=3,
    )
    for name in arguments.models:
        shape = SHAPES[name]
        for ranks in _RUNS[name]:
            for tokens in _TOKENS:
                for form in MIXTURE if shape.experts else DENSE:
                    table.add_row(*_row(name, ranks, tokens, form, room=room))
                table.add_section()
    Console(width=160).print(table)


def _row(name: str, ranks: int, tokens: int, form: Parallelism, *, room: float) -> list[str]:
    shape = SHAPES[name]
    found = memory(shape, ranks, tokens, form)
    sizes = (
        found.held,
        found.gathered,
        found.reducing,
        found.activations,
        found.logits,
        found.total,
    )
    share = found.total / 1e9 / room
    verdict = "no"
    if share <= 1:
        verdict = "yes" if share <= 0.9 else "tight"
    received = sum(moved(shape, ranks, tokens, form).values())
    figures = [f"{size / 1e9:.1f}" for size in sizes]
    return [
        f"{name} × {ranks}",
        f"{tokens:,}",
        form.name,
        *figures,
        verdict,
        f"{received / 1e9:.2f}",
    ]


if __name__ == "__main__":
    main()
