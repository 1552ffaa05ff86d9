"""Estimates what packing saves on an H100: the seconds that the decoder layers of a model take for
a batch, padded and packed, and the MFU.

    python -m benchmarks.packing
    python -m benchmarks.packing --compiled --models "Qwen3.5 9B"

The rows are those of `benchmarks.update`: groups of 8 completions with a heavy tail of lengths, of
400 tokens in the mean, after prompts of 200. They are cut into micro-batches as in a run. Layers
run forward and backward on tensors without contents, as in `benchmarks.roofline`, but uncompiled:
every torch operation is a kernel, so the MFU is lower than that of a run. Attention kernels are
counted by the pairs of tokens that they look at, and the scan of a linear layer (flash-linear-
attention) by its FLOPs and kernels. A mixture is counted as a dense layer of the experts that a
token is routed to. With `--compiled`, norms and MLP around a linear layer are compiled, as
`trainer.compile` does it: a norm and a gate are one kernel each way.

This is a prediction; nothing ran on a GPU.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.command import command_parser, figures_table
from benchmarks.h100 import PEAK, attention_share
from benchmarks.rehearsal import LAUNCH_S, Cost
from benchmarks.roofline import BEYOND, Eager, Rows, groups
from learning import attention
from learning.batching import Sizes, micro_batches
from learning.layout import Layout, Packed, Padded, layout_for
from learning.ranks import Ranks

_SCAN_SHARE = 0.3
"""The share of the peak that the products of a scan reach."""
_SCAN_KERNELS = (12, 25)
"""Kernels of a scan, forward and backward."""
_CHUNK = 64


@dataclass(frozen=True)
class Kind:
    """A model, by one layer of each kind."""

    model_type: str
    sizes: dict[str, Any]
    layers: dict[str, int]
    """Kind of layer -> how many of them the model has."""
    active: int = 0
    """Width of the dense layer that stands for the experts of a token; 0 for a dense model."""
    scan: tuple[int, int, int] = (0, 0, 0)
    """Heads of a linear layer, and the sizes of their keys and values."""

    def model(self, layer: str, count: int) -> Any:
        """Returns a model of `count` layers of a kind, without memory."""
        more = {"layer_types": [layer] * count} if self.layers.keys() != {"full_attention"} else {}
        config = AutoConfig.for_model(
            self.model_type, **self.sizes, **more, num_hidden_layers=count, vocab_size=128
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            if self.active:
                for each in model.model.layers:
                    each.mlp = _Dense(config.hidden_size, self.active)
        return model.train()


class _Dense(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A gated layer of the width of some experts."""

    def __init__(self, width: int, active: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * active, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(active, width, bias=False, dtype=torch.bfloat16)

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        gate, up = self.up(states).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up), None


_WINDOWS = {"sliding_attention": 12, "full_attention": 12}
KINDS: dict[str, Kind] = {
    "gpt-oss 20B": Kind(
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        _WINDOWS,
        active=4 * 2880,
    ),
    "Gemma 2 9B": Kind(
        "gemma2",
        {
            "hidden_size": 3584,
            "intermediate_size": 14_336,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 4096,
        },
        {"sliding_attention": 21, "full_attention": 21},
    ),
    "GLM-4.7 Flash": Kind(
        "deepseek_v3",
        {
            "hidden_size": 2048,
            "intermediate_size": 5 * 1536,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "first_k_dense_replace": 8,
        },
        {"full_attention": 47},
    ),
    "DeepSeek-V3, attention": Kind(
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "intermediate_size": 9 * 2048,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 8,
        },
        {"full_attention": 61},
    ),
    "Qwen3.5 9B": Kind(
        "qwen3_5_text",
        {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        {"linear_attention": 24, "full_attention": 8},
        scan=(32, 128, 128),
    ),
}


@dataclass
class _Scans:
    """Stands for the convolution and the scan of linear layers."""

    kind: Kind
    cost: Cost = field(default_factory=Cost)

    def convolve(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states * 1.0

    def scan(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        heads, keys, values = self.kind.scan
        tokens = query.shape[0] * query.shape[1]
        of_token = 4 * _CHUNK * (keys + values) + 2 * _CHUNK * values + 6 * keys * values
        flops = float(of_token * heads * tokens)
        forward, backward = _SCAN_KERNELS
        seconds = flops / _SCAN_SHARE / PEAK
        self.cost.seconds += max(seconds, forward * LAUNCH_S)
        self.cost.seconds += max(2.5 * seconds, backward * LAUNCH_S)
        result = value * given["beta"][..., None]
        if given.get("initial_state") is not None:
            result = result + given["initial_state"].sum().to(result.dtype)
        state = None
        if given["output_final_state"]:
            state = result.new_zeros(query.shape[0], heads, keys, values) + result.sum()
        return result, state


class _Fused(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Stands for a compiled norm of one tensor, or a gate of two: each is read once each way."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *second: Tensor) -> Tensor:
        ctx.save_for_backward(first, *second)
        return first + second[0] if second else first * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient + each for each in ctx.saved_tensors)


def _compile_around(layer: Any) -> None:
    """Compiles the norms and the MLP of a decoder layer."""

    def gated(states: Tensor) -> Tensor:
        mlp = layer.mlp
        return mlp.down_proj(_Fused.apply(mlp.gate_proj(states), mlp.up_proj(states)))

    layer.input_layernorm.forward = _Fused.apply
    layer.post_attention_layernorm.forward = _Fused.apply
    layer.mlp.forward = gated


@contextmanager
def _stand_ins(scans: _Scans) -> Iterator[None]:
    with (
        patch.object(attention, "_has_kernel", lambda _: True),
        patch.object(modeling_qwen3_5, "causal_conv1d_fn", scans.convolve),
        patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", scans.scan),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def layer_seconds(kind: Kind, layer: str, laid_out: Layout, compiled: bool) -> float:
    """Returns the seconds of the kernels of a layer, forward and backward, without attention
    kernels: what a second layer adds to one. If `compiled`, the code around a linear layer is
    compiled.
    """
    found: list[float] = []
    for count in (1, 2):
        model = kind.model(layer, count)
        if compiled and layer == "linear_attention":
            for each in model.model.layers:
                _compile_around(each)
        layout_for(model, "on" if isinstance(laid_out, Packed) else "off")
        scans = _Scans(kind)
        with _stand_ins(scans):
            model.to_empty(device="cpu")
            with Eager() as kernels:
                hidden = laid_out.hidden(model.model)
                hidden.backward(torch.empty_like(hidden))
        found.append(kernels.cost.seconds + scans.cost.seconds)
    return found[1] - found[0]


def pairs(rows: Rows, window: int | None, layout: type[Layout]) -> tuple[float, float]:
    """Returns the pairs of tokens that attention looks at, and the mean tokens of a row."""
    prompts, completions = rows
    width = max(
        len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, completions, strict=True)
    )
    spans: list[tuple[int, int]] = []  # first and last position of each segment
    for i, (prompt, answer) in enumerate(zip(prompts, completions, strict=True)):
        if layout is Padded:
            spans.append((0, width))
            continue
        if i == 0 or prompt is not prompts[i - 1]:
            spans.append((0, len(prompt)))
        spans.append((len(prompt), len(prompt) + len(answer) - 1))
    bound = math.inf if window is None else window
    total = 0.0
    for first, last in spans:
        total += float(np.minimum(np.arange(first, last) + 1, bound).sum())
    return total, 2 * total / sum(last - first for first, last in spans)


def attention_seconds(
    kind: Kind, layer: str, rows: Rows, layout: type[Layout]
) -> tuple[float, float]:
    """Returns the seconds of the attention kernel of a layer, forward and backward, and the FLOPs
    that it needs.
    """
    if layer == "linear_attention":
        return 0.0, 0.0
    sizes = kind.sizes
    window = sizes.get("sliding_window") if layer == "sliding_attention" else None
    keys = sizes.get("head_dim") or sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    values = sizes.get("v_head_dim", keys)
    total, length = pairs(rows, window, layout)
    needed = 2.0 * total * sizes["num_attention_heads"] * (keys + values)
    is_kernel = kind.model_type not in (("gemma2",) if layout is Packed else ("gemma2", "gpt_oss"))
    if not is_kernel:  # its products and softmax are kernels of torch
        return 0.0, 3.5 * needed
    computed = 2.0 * total * sizes["num_attention_heads"] * 2 * max(keys, values)
    seconds = 0.0
    for flops, backward in ((computed, False), (2.5 * computed, True)):
        share = attention_share("2", keys, length, backward=backward)
        seconds += flops / share / PEAK
    return seconds, 3.5 * needed


def batch_seconds(
    kind: Kind, rows: Rows, layout: type[Layout], tokens: int, compiled: bool = False
) -> tuple[float, int]:
    """Returns the seconds of all decoder layers for a batch, and the tokens that they compute."""
    prompts, completions = rows
    known: dict[int, int] = {}
    sizes = Sizes(
        prompts=np.array([len(prompt) for prompt in prompts]),
        completions=np.array([len(answer) for answer in completions]),
        groups=np.array([known.setdefault(id(prompt), len(known)) for prompt in prompts]),
        shared=layout.shared,
    )
    seconds = 0.0
    computed = 0
    for part in micro_batches(sizes, np.arange(len(prompts)), Ranks(), max_tokens=tokens):
        own = ([prompts[i] for i in part], [completions[i] for i in part])
        laid_out = layout.of(*own)
        computed += laid_out.input_ids.numel()
        for layer, count in kind.layers.items():
            of_kernels = layer_seconds(kind, layer, laid_out, compiled)
            seconds += count * (of_kernels + attention_seconds(kind, layer, own, layout)[0])
    return seconds, computed


def needed_flops(kind: Kind, rows: Rows) -> float:
    """Returns the FLOPs that the layers need, with a shared prompt once."""
    total = 0.0
    tokens = sum(len(answer) - 1 for answer in rows[1])
    tokens += sum(len(prompt) for prompt in {id(each): each for each in rows[0]}.values())
    for layer, count in kind.layers.items():
        parameters = sum(each.numel() for each in kind.model(layer, 1).model.layers.parameters())
        of_attention = attention_seconds(kind, layer, rows, Packed)[1] * 3 / 3.5
        total += count * (6.0 * parameters * tokens + of_attention)
    return total


def main() -> None:
    """Prints the table."""
    parser = command_parser("benchmarks.packing", __doc__)
    parser.add_argument("--models", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--batch", type=int, default=16_384, help="tokens of the batch")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=400, help="mean tokens of a completion")
    parser.add_argument("--compiled", action="store_true", help="what is around a linear layer")
    options = parser.parse_args()
    rows = groups(options.batch, prompt=options.prompt, completion=options.completion)
    for name in options.models:
        table = figures_table(
            f"predicted, not run: the decoder layers of {name} on an H100, uncompiled",
            ["rows", "tokens computed", "seconds", "MFU"],
        )
        kind = KINDS[name]
        flops = needed_flops(kind, rows)
        for layout in (Padded, Packed):
            seconds, computed = batch_seconds(kind, rows, layout, options.tokens, options.compiled)
            reached = flops / (BEYOND * seconds) / PEAK
            table.add_row(
                layout.__name__.lower(),
                f"{computed:,}",
                f"{BEYOND * seconds:.2f}",
                f"{100 * reached:.0f} %",
            )
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
