"""Layers of Qwen3-30B-A3B's shape: grouped products beside a loop over the experts in float32, and
an update's MFU.
"""

import statistics
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.update import full_groups, learn, required_flops
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, activities, cell, costs, finite, seconds
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

_FORWARD = 0.01
_BACKWARD = 0.02
"""Largest error relative to the norm of the exact result: a few of bfloat16's steps of 0.4 %."""
_REPEATS = 3


def measure(found: Findings, setting: Setting) -> None:
    """Compares one layer's experts with their definition, measures them, then measures updates of
    two layers.
    """
    directory = setting.model("small-moe" if setting.small else "30b-a3b-layers")
    config = AutoConfig.from_pretrained(directory)
    with torch.device(setting.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    chosen = str(model.config._experts_implementation)
    found.claim("the implementation of the experts", "grouped_mm", chosen, chosen == "grouped_mm")
    block = model.get_decoder().layers[0].mlp
    _correctness(found, setting, block)
    _speed(found, setting, block)
    del model, block
    _update(found, setting, directory)


def _correctness(found: Findings, setting: Setting, block: Any) -> None:
    """Compares results and gradients of the experts with `by_definition` on the same routes."""
    count = 64 if setting.small else 1024
    width = block.experts.hidden_dim
    states = torch.randn(count, width, device=setting.device).bfloat16()
    upper = torch.randn_like(states)
    with torch.no_grad():
        _, scores, chosen = block.gate(states)
    weights = [block.experts.gate_up_proj, block.experts.down_proj]

    inputs = states.clone().requires_grad_()
    result = block.experts(inputs, chosen, scores)
    gradients = torch.autograd.grad(result, [inputs, *weights], upper)
    exact_inputs = states.float().requires_grad_()
    exact_weights = [weight.detach().float().requires_grad_() for weight in weights]
    exact = by_definition(
        exact_inputs, exact_weights[0], exact_weights[1], chosen=chosen, scores=scores.float()
    )
    wanted = torch.autograd.grad(exact, [exact_inputs, *exact_weights], upper.float())

    used = len(chosen.unique())
    text = f"experts in bfloat16 beside a loop in float32 ({count:,} tokens, {used} experts)"
    found.at_most(f"{text}: error of the result", _error(result, exact), _FORWARD)
    names = ("the states'", "the first matrices'", "the second matrices'")
    for name, one, other in zip(names, gradients, wanted, strict=True):
        found.at_most(f"{text}: error of {name} gradient", _error(one, other), _BACKWARD)


def by_definition(
    states: Tensor, gate_up: Tensor, down: Tensor, *, chosen: Tensor, scores: Tensor
) -> Tensor:
    """Returns the weighted sum [T, H] of the chosen experts' results, one expert after the other.

    Args:
        states: [T, H].
        gate_up: [E, 2 · I, H] gate and up projections of the experts.
        down: [E, H, I].
        chosen: [T, k] the experts of each token.
        scores: [T, k] their weights.
    """
    result = torch.zeros_like(states)
    for expert in range(len(gate_up)):
        tokens, place = torch.where(chosen == expert)
        gate, up = (states[tokens] @ gate_up[expert].t()).chunk(2, dim=-1)
        own = (torch.nn.functional.silu(gate) * up) @ down[expert].t()
        result = result.index_add(0, tokens, own * scores[tokens, place, None])
    return result


def _error(one: Tensor, other: Tensor) -> float:
    return float((one.detach().float() - other.detach()).norm() / other.detach().norm())


def experts_flops(experts: Any, tokens: int, top_k: int) -> float:
    """Returns the floating-point operations of a forward and a backward pass of `tokens` tokens
    through experts.
    """
    parameters = 3 * int(experts.intermediate_dim) * int(experts.hidden_dim)  # gate, up and down
    return 6.0 * tokens * top_k * parameters


def _speed(found: Findings, setting: Setting, block: Any) -> None:
    """Measures the experts alone, forward and backward, with weights in bfloat16 as FSDP2 gathers
    them.
    """
    count = 64 if setting.small else 16_384
    states = (
        torch.randn(count, block.experts.hidden_dim, device=setting.device)
        .bfloat16()
        .requires_grad_()
    )
    with torch.no_grad():
        _, scores, chosen = block.gate(states)
    upper = torch.randn_like(states)

    def both() -> None:
        block.experts(states, chosen, scores).backward(upper)
        block.experts.zero_grad(set_to_none=True)

    took = seconds(both, setting, 5)
    rate = experts_flops(block.experts, count, chosen.shape[1]) / took
    measured = f"{1e3 * took:.1f} ms, {_rate(setting, rate)}"
    found.claim(f"experts in bfloat16, forward and backward of {count:,} tokens", "", measured)
    found.figures["experts_seconds"] = took


def _rate(setting: Setting, rate: float) -> str:
    peak = setting.peak()
    share = "" if peak is None else f", {rate / peak:.1%} of the peak"
    return f"{rate / 1e12:.1f} TFLOP/s{share}"


def _precision(found: Findings, setting: Setting, block: Any) -> None:
    """Records the precision in which the trainer's experts multiply, which autocast alone would
    leave at float32.
    """
    seen: set[str] = set()
    product = torch.nn.functional.grouped_mm

    def recorded(states: Tensor, weights: Tensor, **options: Any) -> Tensor:
        seen.add(str(weights.dtype).removeprefix("torch."))
        return product(states, weights, **options)

    kind = setting.device.type
    states = torch.randn(1, 64, block.experts.hidden_dim, device=kind)
    patched = patch.object(torch.nn.functional, "grouped_mm", recorded)
    with patched, torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=setting.on_gpu):
        block(states)
    expected = "bfloat16" if setting.on_gpu else "float32"
    measured = ", ".join(sorted(seen)) or "no grouped product"
    found.claim("the experts of an update multiply in", expected, measured, measured == expected)


def _update(found: Findings, setting: Setting, directory: Any) -> None:
    """Measures updates of two layers by the trainer, and names the products that its experts
    ran.
    """
    tokens = 512 if setting.small else 16_384
    config = setting.config(directory, "--trainer.micro_batch_tokens", str(tokens))
    groups = full_groups(config)
    with setting.ranks(config) as ranks:
        policy = Policy(config, ranks)
        reference = Reference(policy)
        flops = required_flops(groups, policy.model)
        _precision(found, setting, policy.model.get_decoder().layers[0].mlp)
        first, metrics = learn(policy, reference, groups, config)
        times = [
            learn(policy, reference, groups, config)[0]
            for _ in range(1 if setting.small else _REPEATS)
        ]
        took = statistics.median(times)
        with profile(activities=activities(setting), record_shapes=True) as recorded:
            learn(policy, reference, groups, config)
    measured = f"{metrics.loss:.4g}, norm {metrics.grad_norm:.4g}"
    found.claim("a mixture's loss and gradient are finite", "finite", measured, finite(metrics))
    text = f"update of two layers of experts, {tokens:,} tokens a micro-batch"
    found.claim(text, "", f"{took:.3f} s (the first {first:.1f} s), {_rate(setting, flops / took)}")
    found.figures |= {"update_seconds": took, "first_seconds": first, "flops": flops}
    if setting.on_gpu:
        found.figures["allocated"] = torch.cuda.max_memory_allocated()
        found.claim(
            f"{text}: allocated at the peak", "", f"{found.figures['allocated'] / 1e9:.2f} GB"
        )
    events = [event for event in recorded.key_averages() if "grouped_mm" in str(event.key)]
    names = ", ".join(f"{event.key} × {event.count}" for event in events)
    found.claim("grouped products run in the update", "some", names or "none", bool(events))
    rows = [["operator or kernel", "calls", "ms"]]
    for spent_ms, event in costs(recorded, setting)[:12]:
        rows.append([cell(event), str(event.count), f"{spent_ms:.2f}"])
    found.tables["The most costly operators of an update with experts"] = rows
