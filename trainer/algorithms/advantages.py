"""Advantages: how much better than expected a completion, or one of its tokens, was. Pure
functions.

The group-relative ones take `rewards` [G, n] of G groups of n ≥ 2 completions and return [G, n]. In
their equations r is a reward, and mean, std and Σ are over the completions of one group. `gae`
compares each token with a critic's value instead.

For example, of a group with the rewards 1, 1, 1, 0, whose mean is 0.75 and whose standard deviation
is 0.5:

    group_normalised   0.5     0.5     0.5    −1.5
    group_centred      0.25    0.25    0.25   −0.75
    leave_one_out      0.33    0.33    0.33   −1
    mean_normalised    0.33    0.33    0.33   −1

Rewards have the unit that the reward functions give them; advantages have the same unit, or none
where they are normalised.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import ConfigError
from common.process.imports import named_or_imported
from common.settings.algorithm import AlgorithmSection

Advantage = Callable[[Tensor, Tensor, AlgorithmSection], Tensor]
"""(rewards [G, n], lengths [G, n] in trained tokens, the settings) -> advantages [G, n]"""
_SETTING = "algorithm.advantage"


def group_normalised(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (Shao et al. 2024, arXiv:2402.03300): A = (r − mean) / (std + eps).

    The standard deviation is unbiased (ddof = 1) as in the public implementations. A group of equal
    rewards gets exactly 0.

    Args:
        rewards: [G, n]
        eps: keeps the quotient finite where the rewards hardly differ.
    """
    std = rewards.std(dim=1, keepdim=True, correction=1)
    return (group_centred(rewards) / (std + eps)).masked_fill(_equal(rewards), 0.0)


def group_centred(rewards: Tensor) -> Tensor:
    """Dr. GRPO's advantage (Liu et al. 2025, arXiv:2503.20783): A = r − mean, not normalised.

    Takes and returns [G, n].
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred.masked_fill(_equal(rewards), 0.0)  # not what rounding leaves of a difference


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): A_i = r_i − 1/(n − 1) · Σ_{j ≠ i} r_j.

    This is n/(n − 1) · (r − mean). Takes and returns [G, n].
    """
    n = rewards.shape[-1]
    return group_centred(rewards) * (n / (n - 1))


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    """OPO (Hao et al. 2025, arXiv:2505.23585): A = r − Σ l·r / Σ l, with l the lengths.

    The baseline with the least variance of the gradient, if the square of a completion's gradient
    is proportional to its length.

    Args:
        rewards: [G, n]
        lengths: [G, n] in tokens.
    """
    lengths = lengths.to(rewards.dtype)
    baseline = (lengths * rewards).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    return (rewards - baseline).masked_fill(_equal(rewards), 0.0)


def mean_normalised(rewards: Tensor) -> Tensor:
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): A = (r − mean) / mean, 0 where mean is 0.

    With rewards of 0 and 1 this estimates the gradient of the log of the pass rate instead of that
    of the pass rate. Takes and returns [G, n]. Raises ConfigError for a negative reward: the mean
    would not be a pass rate.
    """
    if (rewards < 0).any():
        raise ConfigError(
            "MaxRL divides by the mean reward of a group, which must not be negative",
            field=_SETTING,
            value="mean_normalised",
            remedy=f"use rewards of at least 0 (there is one of {float(rewards.min()):g}), "
            "or another algorithm.advantage",
        )
    relative = group_centred(rewards) / rewards.mean(dim=1, keepdim=True)
    return relative.masked_fill(_equal(rewards), 0.0)


def reward_normalised(components: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """GDPO (Liu et al. 2026, arXiv:2601.05242, eq. 4 to 6): each reward normalised on its own.

    A_k = (r_k − mean) / (std + eps) for each of K rewards within its group; A = Σ_k w_k · A_k; the
    result is A / (std of A over the batch + eps), so that the scale does not depend on the number
    of rewards. Its mean is 0 already. Normalising the sum of the rewards instead would not
    distinguish groups that differ in one reward from groups that differ in two. A reward that does
    not apply to a completion is NaN: it contributes 0, and the other completions of the group are
    compared without it.

    Args:
        components: [K, G, n] r_k
        weights: [K] w_k
        eps: keeps the quotients finite.

    Returns: [G, n]
    """
    total = sum(
        weight * _normalised_where_there(component, eps)
        for weight, component in zip(weights, components, strict=True)
    )
    assert isinstance(total, Tensor), "there is at least one reward"
    return total / (total.std(correction=1) + eps)


def _normalised_where_there(rewards: Tensor, eps: float) -> Tensor:
    """Returns [G, n] `group_normalised` of those rewards of each group that are not NaN, and 0 for
    the others.
    """
    if not rewards.isnan().any():
        return group_normalised(rewards, eps)

    advantages = torch.zeros_like(rewards)
    for result, group in zip(advantages, rewards, strict=True):
        there = ~group.isnan()
        if there.sum() > 1:  # one alone is compared with nothing
            result[there] = group_normalised(group[there][None], eps)[0]
    return advantages


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, where t + 1 is the next token that
    counts. After the last token V and A are 0. The returns A_t + V_t are the critic's targets and
    are not whitened.

    Args:
        rewards: [R, T] r of each token of R completions of at most T tokens.
        values: [R, T] V, the critic's expectation before token t.
        mask: [R, T] 1 on the tokens that count; the results are 0 elsewhere.
        gamma, gae_lambda: γ and λ.

    Returns: advantages [R, T] and returns [R, T].
    """
    counts = mask.bool()
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        # A token that does not count passes on what is known of the next one that does.
        next_advantage = torch.where(counts[:, t], advantage, next_advantage)
        next_value = torch.where(counts[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(counts[:, t], next_advantage, 0.0)
    returns = torch.where(counts, advantages + values, 0.0)
    return advantages, returns


def one_rank(values: Tensor) -> Tensor:
    """Returns the sums over the ranks where there is only this one: the values themselves."""
    return values


def whiten(
    values: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = one_rank
) -> Tensor:
    """Returns (x − mean) / sqrt(var + 1e-8) where `mask` is 1, with the unbiased variance; 0
    elsewhere.

    Takes and returns tensors of one shape; mean and variance are over the values that count, of
    all ranks.
    """
    kept = values[mask.bool()].double()
    own = torch.tensor([len(kept), kept.sum()], dtype=torch.float64)
    count, values_sum = sum_over_ranks(own).tolist()
    if not count:
        return torch.zeros_like(values)
    mean = values_sum / count
    scale = 1.0
    if count > 1:
        squares = float(sum_over_ranks((kept - mean).square().sum()))
        scale = (squares / (count - 1) + 1e-8) ** -0.5
    return torch.where(mask.bool(), (values - mean) * scale, 0.0)


ADVANTAGES: dict[str, Advantage] = {
    "group_normalised": lambda rewards, _, settings: group_normalised(
        rewards, settings.advantage_eps
    ),
    "group_centred": lambda rewards, _, __: group_centred(rewards),
    "leave_one_out": lambda rewards, _, __: leave_one_out(rewards),
    "batch_normalised": lambda rewards, _, __: group_centred(rewards),
    "length_weighted": lambda rewards, lengths, _: length_weighted(rewards, lengths),
    "mean_normalised": lambda rewards, _, __: mean_normalised(rewards),
    "none": lambda rewards, _, __: torch.zeros_like(rewards),
}
"""The advantages that need only the rewards and lengths of a group, by their names in
`algorithm.advantage`, which may also be an import path."""
NEED_MORE_THAN_REWARDS = ("gae", "reward_normalised")
"""The advantages that also need a critic's values, or the scores of each reward function."""
WHITENED = ("gae", "batch_normalised")
"""The advantages that are then whitened over the tokens of the batch: PPO, and REINFORCE++ with a
group baseline (Hu et al. 2025, arXiv:2501.03262), as in the public implementations."""


def named_advantage(settings: AlgorithmSection) -> Advantage:
    """Returns the advantage of the settings, none of `NEED_MORE_THAN_REWARDS`.

    Raises ConfigError when it cannot be imported; the returned function does when an imported one
    does not return [G, n].
    """
    estimate = named_or_imported(settings.advantage, ADVANTAGES, _SETTING)

    def checked(rewards: Tensor, lengths: Tensor, settings: AlgorithmSection) -> Tensor:
        advantages = estimate(rewards, lengths, settings)
        # Advantages of another shape may broadcast to wrong ones, and nothing would fail.
        if advantages.shape != rewards.shape:
            raise ConfigError(
                f"these advantages have the shape {tuple(advantages.shape)} for rewards of the "
                f"shape {tuple(rewards.shape)}",
                field=_SETTING,
                value=settings.advantage,
                remedy="return one number for each reward",
            )
        return advantages

    return checked


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), to be added to
    the rewards.

    −clip((l − (max_new_tokens − buffer)) / buffer, 0, 1): 0 up to `max_new_tokens - buffer` tokens,
    then falling linearly to -1 at `max_new_tokens`, and -1 beyond. `lengths` l, `max_new_tokens`
    and `buffer` are in tokens; the result has the shape of `lengths`.
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

    Args:
        lengths: [rows] in tokens.
        pass_rates: [rows] share of the row's group that is correct, from 0 to 1.
        group_size: completions in a group.
        max_new_tokens: the longest completion that can be sampled.

    Returns: [rows]
    """
    return -pass_rates.clamp(min=1 / group_size) * lengths / max_new_tokens


def _equal(rewards: Tensor) -> Tensor:
    """Returns [G, 1] whether all rewards of a group are the same."""
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
