"""Advantages: how much better than expected a completion, or one of its tokens, was. Pure
functions.

The group-relative ones take rewards [groups, n] and completion lengths in tokens, and return
[groups, n]. `gae` compares each token with a critic's value instead.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import ConfigError

Advantage = Callable[[Tensor, Tensor, float], Tensor]
"""(rewards, lengths, eps) -> advantages"""


def group_normalised(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (Shao et al. 2024, arXiv:2402.03300, eq. 2): (r - mean) / (std + eps) within
    each group.

    The standard deviation is unbiased (ddof = 1) as in the public implementations. A group of equal
    rewards gets exactly 0. Raises ValueError for groups of one.
    """
    _check(rewards)
    advantages = group_centred(rewards) / (rewards.std(dim=1, keepdim=True, correction=1) + eps)
    return torch.where(_equal(rewards), torch.zeros_like(advantages), advantages)


def group_centred(rewards: Tensor) -> Tensor:
    """Reward minus the mean of its group, without normalisation: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783).
    """
    _check(rewards)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return torch.where(_equal(rewards), torch.zeros_like(centred), centred)


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): r minus the mean of the *other* completions,
    n/(n-1)·(r - mean).
    """
    n = rewards.shape[-1]
    return group_centred(rewards) * (n / (n - 1))


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    """OPO (Hao et al. 2025, arXiv:2505.23585): r minus the length-weighted mean Σ l·r / Σ l of its
    group.
    """
    _check(rewards)
    lengths = lengths.to(rewards.dtype)
    baseline = (lengths * rewards).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    return torch.where(_equal(rewards), torch.zeros_like(rewards), rewards - baseline)


def mean_normalised(rewards: Tensor) -> Tensor:
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): (r − mean) / mean within each group, 0 where no
    completion has a reward.

    With rewards of 0 and 1 this estimates the gradient of the log of the pass rate instead of that
    of the pass rate. Raises
    ConfigError for a negative reward: the mean would not be a pass rate.
    """
    if (rewards < 0).any():
        raise ConfigError(
            "MaxRL divides by the mean reward of a group, which must not be negative",
            field="algorithm.advantage",
            value="mean_normalised",
            remedy=f"use rewards of at least 0 (there is one of {float(rewards.min()):g}), or another algorithm.advantage",
        )
    centred = group_centred(rewards)
    return torch.where(_equal(rewards), centred, centred / rewards.mean(dim=1, keepdim=True))


def reward_normalised(components: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """GDPO (Liu et al. 2026, arXiv:2601.05242, eq. 4 to 6): each reward normalised separately
    within its group.

    The weighted sum is then divided by its standard deviation over the batch, so that the scale
    does not depend on the number of rewards; its mean is 0 already. Normalising the sum of the
    rewards instead would not distinguish groups that
    differ in one reward from groups that differ in two. A reward that does not apply to a
    completion is NaN: it contributes 0, and the other completions of the group are compared without
    it.

    Args:
        components: [rewards, groups, n]
        weights: [rewards]
    """
    total = sum(
        weight * _normalised_where_there(each, eps)
        for weight, each in zip(weights, components, strict=True)
    )
    assert isinstance(total, Tensor), "there is at least one reward"
    return total / (total.std(correction=1) + eps)


def _normalised_where_there(rewards: Tensor, eps: float) -> Tensor:
    """Returns `group_normalised` of those rewards of each group that are not NaN, and 0 for the
    others.
    """
    there = ~rewards.isnan()
    if there.all():
        return group_normalised(rewards, eps)
    found = torch.zeros_like(rewards)
    for group, mask, own in zip(found, there, rewards, strict=True):
        if mask.sum() > 1:
            group[mask] = group_normalised(own[mask][None], eps)[0]
    return found


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16) and the
    returns A + V.

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, where t + 1 is the next token that
    counts. After the last token the value is 0. The returns are the critic's targets and are not
    whitened.

    Args:
        rewards, values: [rows, T]; `values` [t] is the critic's expectation before token t.
        mask: [rows, T], 1 on the tokens that count; the results are 0 elsewhere.
    """
    counts = mask.bool()
    advantages, ahead, next_value = (
        torch.zeros_like(values),
        torch.zeros_like(values[:, 0]),
        torch.zeros_like(values[:, 0]),
    )
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = torch.where(counts[:, t], delta + gamma * gae_lambda * ahead, ahead)
        next_value = torch.where(counts[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(counts[:, t], ahead, 0.0)
    return advantages, torch.where(counts, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Returns (x − mean) / sqrt(var + 1e-8) where `mask` is 1, with the unbiased variance; 0
    elsewhere.
    """
    kept = values[mask.bool()]
    scale = torch.rsqrt(kept.var(correction=1) + 1e-8) if len(kept) > 1 else 1.0
    return torch.where(mask.bool(), (values - kept.mean()) * scale, 0.0)


ADVANTAGES: dict[str, Advantage] = {
    "group_normalised": lambda rewards, _, eps: group_normalised(rewards, eps),
    "group_centred": lambda rewards, _, __: group_centred(rewards),
    "leave_one_out": lambda rewards, _, __: leave_one_out(rewards),
    "batch_normalised": lambda rewards, _, __: group_centred(rewards),
    "length_weighted": lambda rewards, lengths, _: length_weighted(rewards, lengths),
    "mean_normalised": lambda rewards, _, __: mean_normalised(rewards),
    "none": lambda rewards, _, __: torch.zeros_like(rewards),
}
"""The advantages that need only the rewards and lengths of a group, by name."""
WHITENED = ("gae", "batch_normalised")
"""The advantages that are then whitened over the tokens of the batch: PPO, and REINFORCE++ with a
group baseline (Hu et al. 2025, arXiv:2501.03262), as in the public implementations."""


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), to be added to
    the rewards.

    0 up to `max_new_tokens - buffer` tokens, then falling linearly to -1 at `max_new_tokens`, and
    -1 beyond.
    """
    over = (lengths - (max_new_tokens - buffer)).clamp(min=0, max=buffer)
    return -over / buffer


def length_penalty(
    lengths: Tensor, pass_rates: Tensor, group_size: int, max_new_tokens: int
) -> Tensor:
    """ALP's penalty (Xiang et al. 2025, arXiv:2506.05256), to be multiplied by a coefficient and
    added to the rewards.

    −max(pass rate, 1 / group size) · length / max_new_tokens: answers to easy problems should be
    short, those to hard ones may be long.
    """
    return -pass_rates.clamp(min=1 / group_size) * lengths / max_new_tokens


def _check(rewards: Tensor) -> None:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        shape = tuple(rewards.shape)
        raise ValueError(
            f"a group-relative advantage needs groups of at least 2 completions, got shape {shape}"
        )


def _equal(rewards: Tensor) -> Tensor:
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
