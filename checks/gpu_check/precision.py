"""Compares bfloat16 with float32 on the same weights and tokens: scores, gradients and an optimiser
step.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.update import full_groups
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from common.settings.sections import OptimizerSection
from learning.layout import Packing, moved
from learning.optimizer import Optimizer
from trainer.policy.scorer import Scorer, load_model

_RATE = 1e-6


def correctness(found: Findings, setting: Setting) -> None:
    """Compares autocast to bfloat16, as in an update on one GPU, with float32 on the same rows and
    any kernels.
    """
    shape, tokens = ("small", 512) if setting.small else ("0.5b", 4096)
    config = setting.config(setting.model(shape), "--trainer.micro_batch_tokens", str(tokens))
    groups = full_groups(config)[:4]
    rows = [
        (group.prompt_token_ids, completion.token_ids)
        for group in groups
        for completion in group.completions
    ]
    exact = scored(setting, config, rows, bfloat16=False)
    low = scored(setting, config, rows, bfloat16=True)
    apart = (low["logprobs"] - exact["logprobs"]).abs()
    found.at_most(
        "bfloat16 compared with float32: mean |Δ log-probability|", float(apart.mean()), 0.01
    )
    found.at_most(
        "bfloat16 compared with float32: largest |Δ log-probability|", float(apart.max()), 0.15
    )
    entropy = (low["entropy"] - exact["entropy"]).abs()
    found.at_most("bfloat16 compared with float32: mean |Δ entropy|", float(entropy.mean()), 0.01)
    found.at_least(
        "bfloat16 compared with float32: cosine of the gradients",
        cosine(low["gradients"], exact["gradients"]),
        0.99,
    )
    worst = min(
        (cosine([a], [b]) for a, b in zip(low["gradients"], exact["gradients"], strict=True)),
        default=1.0,
    )
    found.claim(
        "bfloat16 compared with float32: smallest cosine of a tensor's gradient", "", f"{worst:.4f}"
    )
    found.at_least(
        "an AdamW step: share of weights that move the same way",
        _agreement(low["moves"], exact["moves"]),
        0.9,
    )


def scored(
    setting: Setting,
    config: Any,
    rows: list[tuple[Any, Any]],
    bfloat16: bool,
    packing: Packing = "on",
) -> dict[str, Any]:
    """Returns scores, gradients and the change of the weights by one step."""
    model = load_model(config.model).to(setting.device).train()
    scorer = Scorer(model, packing)
    prompts = [prompt for prompt, _ in rows]
    completions = [completion for _, completion in rows]
    layout = moved(scorer.layout.of(prompts, completions), setting.device)
    targets = torch.from_numpy(np.concatenate(completions).astype(np.int64)).to(setting.device)
    weights = torch.linspace(-1, 1, len(targets), device=setting.device) / len(targets)
    with torch.autocast(setting.device.type, torch.bfloat16, enabled=bfloat16):
        scores = scorer(layout, targets, 1.0)
        (weights * scores.logprobs).sum().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = _copied([parameter.grad for parameter in parameters])
    before = _copied(parameters)
    Optimizer(model, OptimizerSection(adam_betas=(0.9, 0.999))).step(_RATE)
    moves = [
        parameter.detach().float() - old for parameter, old in zip(parameters, before, strict=True)
    ]
    found = {
        "logprobs": scores.logprobs.detach().float().cpu(),
        "entropy": scores.entropy.detach().float().cpu(),
    }
    return {**found, "gradients": gradients, "moves": moves}


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Returns copies on the tensors' device, where sums over half a billion values take no time."""
    return [tensor.detach().to(torch.float32, copy=True) for tensor in tensors]


def _dot(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def cosine(one: list[Tensor], other: list[Tensor]) -> float:
    """Returns the cosine of all numbers of two lists of tensors."""
    dot = _dot(one, other)
    left = _dot(one, one)
    right = _dot(other, other)
    return float(dot / (left * right) ** 0.5) if left * right > 0 else float("nan")


def _agreement(one: list[Tensor], other: list[Tensor]) -> float:
    """Returns the share of the exact step, by size of its gradient, that has the same sign in the
    other.
    """
    same = sum(
        float((other_part.abs() * (part.sign() == other_part.sign())).sum())
        for part, other_part in zip(one, other, strict=True)
    )
    return same / sum(float(part.abs().sum()) for part in other)
