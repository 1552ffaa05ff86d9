"""Policy losses, KL estimators, aggregation and off-policy corrections, per token. Pure functions.

The tokens of all completions are concatenated without padding to [tokens]; `rows` [tokens] holds
the index of the completion that each token belongs to.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.settings.algorithm import AlgorithmSection

_MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ±20 before exp, as in the public implementations, to prevent
overflow."""
_MAX_SEQUENCE_LOG_RATIO = 10.0

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
]


@dataclass
class PolicyLoss:
    """The result of a policy loss; every tensor has the shape of the log-probabilities."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """1 where clipping took effect, else 0."""


def row_sum(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Returns [count] sums of `values` [tokens] by completion."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, rows, values)


def row_mean(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Returns [count] means of `values` [tokens] by completion."""
    return row_sum(values, rows, count) / row_sum(torch.ones_like(values), rows, count).clamp(min=1)


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Returns π(token) / π_old(token) for each token; the gradient flows through `logprobs`."""
    return torch.exp((logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, rows: Tensor, count: int) -> Tensor:
    """GSPO's ratio (Zheng et al. 2025, arXiv:2507.18071, eq. 7 and 14): exp of the mean log ratio
    of the whole completion.

    Every token of a completion has the same value; the gradient flows through that token's own
    log-probability.
    """
    mean = row_mean((logprobs - old_logprobs).detach(), rows, count)[rows]
    return torch.exp((mean + logprobs - logprobs.detach()).clamp(max=_MAX_SEQUENCE_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with separate bounds
    (DAPO's clip-higher).

    Args:
        ratio: [tokens] from `probability_ratio` or `sequence_ratio`.
        advantages: [tokens]
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: upper bound c of the loss of tokens with negative advantage, -c·A (Ye et al.
        2019, arXiv:1912.09729).
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, cut = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (bound < loss)
        loss, cut = torch.where(over, bound, loss), cut | over
    return PolicyLoss(loss, ratio, cut.float())


def cispo(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4): the clipped ratio weighs the policy gradient
    and carries none itself.

    Unlike in PPO, a clipped token keeps its gradient.
    """
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * advantages * logprobs, ratio, (weight != ratio.detach()).float())


def divergence_masked(
    ratio: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
) -> PolicyLoss:
    """DPPO with the binary total variation (Qi et al. 2026, "Rethinking the Trust Region in LLM
    Reinforcement Learning").

    The ratio is not clipped. A token is masked if, in the direction of its advantage, its
    *probability* has already
    moved too far from that under the policy which sampled it: up by more than `high`, or down by
    more than `low`. A
    ratio is a poor measure of that: it doubles from 1e-4 to 2e-4 and hardly changes from .9 to .99.
    """
    moved = (logprobs.exp() - rollout_logprobs.exp()).detach()
    out = torch.where(advantages > 0, moved > high, moved < -low)
    return PolicyLoss(torch.where(out, 0.0, -advantages * ratio), ratio, out.float())


def sapo(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a sigmoid of the ratio, 4/τ · σ(τ·(ρ − 1)), instead
    of clipping.

    Its slope is 1 at ρ = 1 and fades on both sides, faster for larger τ: `tau_positive` for tokens
    with a positive advantage, `tau_negative` for the others. Nothing is cut, so `clipped` is 0.
    """
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return PolicyLoss(
        -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), ratio, torch.zeros_like(ratio)
    )


def kl_divergence(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimates KL(policy ‖ reference) per token from samples of the policy (Schulman,
    joschu.net/blog/kl-approx.html).

    Args:
        logprobs: [tokens] in nats; the gradient flows through them.
        ref_logprobs: [tokens]
        estimator: k1 = lp − ref (unbiased, high variance), k2 = ½(lp − ref)² (biased, low
            variance), k3 = exp(ref − lp) − (ref − lp) − 1 (unbiased, never negative).
    """
    difference = (logprobs - ref_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.exp(-difference) + difference - 1


KL_HORIZON = 10_000
"""Time constant of an adaptive kl_coef, in completions (Ziegler et al. 2019)."""


def adapted_kl_coef(kl_coef: float, kl: float, target: float, completions: int) -> float:
    """Returns the coefficient after a batch of `completions` with KL per token `kl` (Ziegler et al.
    2019, arXiv:1909.08593).

    Multiplied by 1 + clip(kl/target − 1, ±0.2) · completions/KL_HORIZON: it rises while the policy
    is further from the reference than `target`.
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return kl_coef * (1 + error * completions / KL_HORIZON)


def token_coefficients(
    aggregation: Aggregation,
    lengths: Tensor,
    total_tokens: int,
    total_rows: int,
    max_new_tokens: int,
) -> Tensor:
    """Returns each token's coefficient; the loss is then the plain sum over all micro-batches and
    ranks.

    Args:
        aggregation: `token_mean` (DAPO): every token of the global batch counts the same.
            `sequence_mean_token_mean` (the original GRPO): every completion counts the same.
            `sequence_mean_token_sum`: the mean over completions of their sums. `constant` (Dr.
            GRPO): the sum over completions × max_new_tokens.
        lengths: [tokens] length of the completion that each token belongs to.
        total_tokens, total_rows: of the global batch.
    """
    divisors: dict[Aggregation, int | Tensor] = {
        "token_mean": total_tokens,
        "sequence_mean_token_mean": lengths * total_rows,
        "sequence_mean_token_sum": total_rows,
        "constant": total_rows * max_new_tokens,
    }
    return torch.ones_like(lengths, dtype=torch.float32) / divisors[aggregation]


def importance_correction(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rows: Tensor,
    count: int,
    mode: Literal["truncate", "mask"],
    level: Literal["token", "sequence"],
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """Returns weights [tokens], without gradient, that correct for the gap between engine and
    trainer policy.

    w = π_trainer / π_rollout of the token or, with level `sequence`, its product over the
    completion. `truncate` limits w to `cap` (truncated importance sampling, Yao et al. 2025);
    `mask` sets weights above `cap` or below `floor` (None: 1/cap) to 0. `mask` by token is IcePop
    (Ling team 2025, arXiv:2510.18855), whose bounds are 0.5 and 5.
    """
    log_weight = (proximal_logprobs - rollout_logprobs).detach()
    if level == "sequence":
        log_weight = row_sum(log_weight, rows, count)[rows]
    weight = torch.exp(log_weight.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    if mode == "truncate":
        return weight.clamp(max=cap)
    return torch.where(
        (weight > cap) | (weight < (floor or 1 / cap)), torch.zeros_like(weight), weight
    )


def geometric_mask(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rows: Tensor,
    count: int,
    low: float | None,
    high: float | None,
) -> Tensor:
    """Returns 0 on the tokens of completions whose geometric mean π_trainer / π_rollout is outside
    [low, high], else 1.

    This rejects whole sequences by a length-normalised ratio (Liu et al. 2025, "When Speed Kills
    Stability"); verl calls it `seq_mean_k1` and uses [0.999, 1.001]. The product over a completion
    would reject long ones whatever their tokens are.
    """
    mean = row_mean((proximal_logprobs - rollout_logprobs).detach(), rows, count)[rows]
    above = torch.ones_like(mean) if low is None else (mean >= math.log(low)).float()
    return above if high is None else above * (mean <= math.log(high)).float()


def off_policy_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    rows: Tensor,
    count: int,
    delta: float,
) -> Tensor:
    """OPSM (DeepSeek-V3.2, arXiv:2512.02556): 0 on completions with negative advantage whose policy
    moved too far, else 1.

    Too far: the mean of log(π_behaviour / π) over the completion is above `delta`.
    """
    moved = row_mean((rollout_logprobs - logprobs).detach(), rows, count)[rows]
    return ((advantages >= 0) | (moved <= delta)).float()


def policy_loss(
    config: AlgorithmSection,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    rows: Tensor,
    count: int,
) -> PolicyLoss:
    """Returns the loss per token before weights and aggregation.

    `logprobs` [tokens] are those of the policy being trained, `old_logprobs` [tokens] those that
    the ratio refers to, `rollout_logprobs` [tokens] those of the policy that sampled the tokens.
    """
    if config.importance_level == "sequence":
        ratio = sequence_ratio(logprobs, old_logprobs, rows, count)
    else:
        ratio = probability_ratio(logprobs, old_logprobs)
    if config.policy_loss == "cispo":
        return cispo(ratio, logprobs, advantages, config.clip_low, config.clip_high)
    if config.policy_loss == "dppo":
        return divergence_masked(
            ratio, logprobs, rollout_logprobs, advantages, config.clip_low, config.clip_high
        )
    if config.policy_loss == "sapo":
        return sapo(ratio, advantages, config.sapo_tau_positive, config.sapo_tau_negative)
    return clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)


def policy_weights(
    config: AlgorithmSection,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    rows: Tensor,
    count: int,
) -> Tensor:
    """Returns the weight [tokens] of each token in the policy loss, without gradient: corrections
    times masks.

    The arguments are those of `policy_loss`. The KL term and the entropy bonus count every token.
    """
    weights = torch.ones_like(rollout_logprobs)
    if config.correction is not None:
        level, cap, floor = config.correction_level, config.correction_cap, config.correction_floor
        weights = importance_correction(
            old_logprobs, rollout_logprobs, rows, count, config.correction, level, cap, floor
        )
    if config.rejects:
        low, high = config.geometric_low, config.geometric_high
        weights = weights * geometric_mask(old_logprobs, rollout_logprobs, rows, count, low, high)
    if config.off_policy_delta is not None:
        weights = weights * off_policy_mask(
            logprobs, rollout_logprobs, advantages, rows, count, config.off_policy_delta
        )
    return weights
