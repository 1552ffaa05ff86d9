"""TRL's losses against its definitions, written in numpy, on padded rows of one forward pass."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainer.algorithms.losses import TokenTerms, policy_loss, token_coefficients
from trainer.api.grpo import GRPOConfig

LENGTHS = np.array([3, 7, 1, 5])
LONGEST = 9
EPSILON = 0.2
NEEDS: dict[str, dict[str, Any]] = {
    "cispo": {"epsilon_high": 5.0},
    "luspo": {"importance_sampling_level": "sequence"},
}
"""What TRL's documentation recommends or asks for beside a loss."""
Array = NDArray[np.float64]


def numbers(seed: int) -> tuple[Array, Array, Array, Array]:
    """Returns mask, new and old log-probabilities [rows, tokens], and advantages [rows, 1]."""
    chance = np.random.default_rng(seed)
    shape = (len(LENGTHS), int(LENGTHS.max()))
    mask = (np.arange(shape[1]) < LENGTHS[:, None]).astype(float)
    old = -chance.exponential(1.0, shape)
    new = old + chance.normal(0.0, 0.3, shape)
    return mask, new, old, chance.normal(0.0, 1.0, (shape[0], 1))


def clipped(ratio: Array, advantages: Array) -> Array:
    bounded = np.clip(ratio, 1 - EPSILON, 1 + EPSILON)
    return -np.minimum(ratio * advantages, bounded * advantages)


def defined(loss_type: str, mask: Array, new: Array, old: Array, advantages: Array) -> float:
    """Returns the loss by TRL's documentation of `loss_type`."""
    ratio = np.exp(new - old)
    if loss_type == "luspo":
        whole = np.exp(((new - old) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True))
        return float((clipped(whole, advantages) * mask.sum(1, keepdims=True)).mean())
    if loss_type == "cispo":
        losses = -np.minimum(ratio, 5.0) * advantages * new
    elif loss_type == "sapo":
        temperature = np.where(advantages > 0, 1.0, 1.05)
        losses = -advantages * 4 / temperature / (1 + np.exp(-temperature * (ratio - 1)))
    else:
        losses = clipped(ratio, advantages)
    sums = (losses * mask).sum(1)
    if loss_type in ("grpo", "sapo"):
        return float((sums / mask.sum(1)).mean())
    if loss_type == "dr_grpo":
        return float(sums.sum() / (len(mask) * LONGEST))
    return float(sums.sum() / mask.sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo"])
def test_a_loss_is_what_trl_defines(loss_type: str, seed: int) -> None:
    arguments: dict[str, Any] = {
        "loss_type": loss_type,
        "use_cpu": True,
        "max_completion_length": LONGEST,
    }
    made = GRPOConfig(**arguments | NEEDS.get(loss_type, {}))
    config = made.to_config(8, 0, Path("out"))
    mask, new, old, advantages = numbers(seed)

    there = mask.astype(bool)
    rows = torch.from_numpy(np.nonzero(mask)[0])
    lengths = torch.from_numpy(LENGTHS)[rows]
    policy = torch.from_numpy(new[there])
    behaviour = torch.from_numpy(old[there])
    tokens = TokenTerms(
        logprobs=policy,
        old_logprobs=behaviour,
        rollout_logprobs=behaviour,
        advantages=torch.from_numpy(np.broadcast_to(advantages, mask.shape)[there]),
        row_of_token=rows,
        row_count=len(mask),
    )
    per_token = policy_loss(config.algorithm, tokens).loss
    coefficients = token_coefficients(
        config.algorithm.aggregation,
        lengths,
        total_tokens=len(rows),
        total_rows=len(mask),
        max_new_tokens=config.sampling.max_new_tokens,
    )
    found = (per_token * coefficients).sum().item()
    assert found == pytest.approx(defined(loss_type, mask, new, old, advantages), rel=1e-5)
