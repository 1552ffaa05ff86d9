"""Policy losses, KL estimators, aggregation and off-policy corrections, per token. Pure functions.

Data flow of one micro-batch (`Policy._backward`):

    TokenTerms ─┬─ policy_loss ────► loss ───┐
                └─ policy_weights ─► weight ─┴─ × ─► + β · KL − entropy bonus ─┐
    the group's weight in prioritised reuse ───────────────────────────────────┼─ × ─► Σ
    token_coefficients ────────────────────────────────────────────────────────┘

A row is one completion with its prompt, as in `trainer.algorithms.batch`. The papers call it a
sequence, and so do the settings that are named after theirs.

Shapes: C is the number of trained tokens of all rows of a micro-batch, concatenated without
padding; R is the number of rows. `row_of_token` [C] holds the index, 0 to R − 1, of the row that a
token belongs to. Log-probabilities are in nats, at the sampling temperature.

In the equations, t is a token, A_t its advantage, π the policy that is trained, π_old the policy
that the ratio refers to, μ the policy that sampled the token, ρ_t = π(t) / π_old(t), and sg stops
the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.errors import ConfigError
from common.process.imports import named_or_imported
from common.settings.algorithm import AlgorithmSection

_SETTING = "algorithm.policy_loss"
"""The setting that errors name."""

_MAX_LOG_RATIO = 20.0
"""Log ratios of tokens are clamped to ±20 before exp, as in the public implementations, to prevent
overflow. Beyond a bound the gradient is 0."""
_MAX_ROW_LOG_RATIO = 10.0
"""Upper bound of the mean log ratio of a row, as in verl. There is no lower bound: exp of a very
negative mean is 0."""

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The C trained tokens of a micro-batch, as the policy loss and its weights see them.

    Log-probabilities are in nats, at the sampling temperature.
    """

    logprobs: Tensor
    """[C] under the policy that is trained, π; the gradient flows through them."""
    old_logprobs: Tensor
    """[C] under π_old: μ, or the trainer's policy before this batch (`Policy` chooses)."""
    rollout_logprobs: Tensor
    """[C] under the policy that sampled the tokens, μ."""
    advantages: Tensor
    """[C]"""
    row_of_token: Tensor
    """[C] index of the row that each token belongs to."""
    row_count: int
    """R"""

    def mean_of_row(self, values: Tensor) -> Tensor:
        """Returns [C] the mean of `values` [C] over the row of each token."""
        zeros = values.new_zeros(self.row_count)
        sums = zeros.index_add(0, self.row_of_token, values)
        lengths = zeros.index_add(0, self.row_of_token, torch.ones_like(values))
        # A row without trained tokens has no mean, and no token that would read it.
        return (sums / lengths.clamp(min=1))[self.row_of_token]


@dataclass
class PolicyLoss:
    """The result of a policy loss."""

    loss: Tensor
    """[C] loss of each token, before weights and aggregation."""
    ratio: Tensor
    """[C] ρ, of the token or of its row."""
    clipped: Tensor
    """[C] 1 where clipping or a mask took effect, else 0."""


Loss = Callable[[Tensor, TokenTerms, AlgorithmSection], PolicyLoss]
"""(ρ [C], the tokens, the settings) -> the loss of each token"""


def policy_loss(settings: AlgorithmSection, tokens: TokenTerms) -> PolicyLoss:
    """Returns the loss of each token, before weights and aggregation.

    Raises ConfigError when `algorithm.policy_loss` names no loss, or one that does not return a
    number for each token.
    """
    by_row = settings.importance_level == "sequence"
    ratio = row_ratio(tokens) if by_row else ratio_of(tokens.logprobs, tokens.old_logprobs)
    result = named_loss(settings)(ratio, tokens, settings)
    # A loss of another shape may broadcast to a wrong loss, and nothing would fail.
    if result.loss.shape != ratio.shape:
        raise ConfigError(
            f"this loss has the shape {tuple(result.loss.shape)} for {len(ratio)} tokens",
            field=_SETTING,
            value=settings.policy_loss,
            remedy="return one number for each token",
        )
    return result


def ratio_of(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Returns the ratio of two probabilities from their logarithms in nats."""
    log_ratio = logprobs - other_logprobs
    return torch.exp(log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def row_ratio(tokens: TokenTerms) -> Tensor:
    """GSPO's ratio of a whole row (Zheng et al. 2025, arXiv:2507.18071, eq. 7 and 14).

    s = exp(1/L · Σ_t log ρ_t), over the L tokens of a row. Returns [C], in which every token of a
    row has the same value. The gradient of that value flows through the token's own log-probability
    (eq. 14): s_t = sg(s) · π(t) / sg(π(t)).
    """
    logprobs = tokens.logprobs
    mean = tokens.mean_of_row((logprobs - tokens.old_logprobs).detach())
    with_gradient = mean + logprobs - logprobs.detach()  # the value is the mean
    return torch.exp(with_gradient.clamp(max=_MAX_ROW_LOG_RATIO))


def clipped_surrogate(ratio: Tensor, tokens: TokenTerms, settings: AlgorithmSection) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    loss_t = −min(ρ_t · A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) · A_t). Separate bounds are
    DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476). With `dual_clip` c the loss of a token
    with A_t < 0 is at most −c · A_t (Ye et al. 2019, arXiv:1912.09729).

    For example, with bounds of 0.2:

    | A | ρ | −ρ·A | −clip(ρ)·A | loss | effect |
    |---|---|---|---|---|---|
    | 1 | 1.5 | −1.5 | −1.2 | −1.2 | it became likely enough: no gradient |
    | −1 | 1.5 | 1.5 | 1.2 | 1.5 | it became likelier, and is bad: the full gradient |
    | −1 | 0.5 | 0.5 | 0.8 | 0.8 | it became unlikely enough: no gradient |
    """
    advantages = tokens.advantages
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(unclipped_loss, clipped_loss)
    took_effect = clipped_loss > unclipped_loss

    if settings.dual_clip is not None:
        bound = -advantages * settings.dual_clip
        exceeds = (advantages < 0) & (loss > bound)
        loss = torch.where(exceeds, bound, loss)
        took_effect = took_effect | exceeds

    return PolicyLoss(loss=loss, ratio=ratio, clipped=took_effect.float())


def cispo(ratio: Tensor, tokens: TokenTerms, settings: AlgorithmSection) -> PolicyLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4): the clipped ratio weighs the policy gradient.

    loss_t = −sg(clip(ρ_t, 1 − clip_low, 1 + clip_high)) · A_t · log π(t). The ratio carries no
    gradient, so that, unlike in PPO, a clipped token keeps the gradient of its log-probability.
    """
    unclipped = ratio.detach()
    weight = unclipped.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return PolicyLoss(
        loss=-weight * tokens.advantages * tokens.logprobs,
        ratio=ratio,
        clipped=(weight != unclipped).float(),
    )


def dppo(ratio: Tensor, tokens: TokenTerms, settings: AlgorithmSection) -> PolicyLoss:
    """DPPO with the binary total variation (Qi et al. 2026, "Rethinking the Trust Region in LLM
    Reinforcement Learning").

    loss_t = −M_t · ρ_t · A_t, where M_t = 0 if A_t > 0 and π(t) − μ(t) > clip_high, or if A_t ≤ 0
    and π(t) − μ(t) < −clip_low, and 1 otherwise. The bounds are differences of probabilities. The
    ratio is not clipped: a token is masked if its *probability* has already moved too far in the
    direction of its advantage. A ratio is a poor measure of that: it doubles from 1e-4 to 2e-4 and
    hardly changes from .9 to .99.
    """
    advantages = tokens.advantages
    moved = (tokens.logprobs.exp() - tokens.rollout_logprobs.exp()).detach()
    masked = torch.where(advantages > 0, moved > settings.clip_high, moved < -settings.clip_low)
    loss = torch.where(masked, 0.0, -advantages * ratio)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=masked.float())


def sapo(ratio: Tensor, tokens: TokenTerms, settings: AlgorithmSection) -> PolicyLoss:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a sigmoid of the ratio instead of clipping.

    loss_t = −4/τ · σ(τ · (ρ_t − 1)) · A_t, with `sapo_tau_positive` as τ of tokens with a positive
    advantage and `sapo_tau_negative` of the others. The sigmoid's slope is 1 at ρ = 1 and fades on
    both sides, faster for larger τ. Nothing is cut, so `clipped` is 0.
    """
    advantages = tokens.advantages
    tau = torch.full_like(ratio, settings.sapo_tau_negative)
    tau = tau.masked_fill(advantages > 0, settings.sapo_tau_positive)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=torch.zeros_like(ratio))


LOSSES: dict[str, Loss] = {
    "clip": clipped_surrogate,
    "cispo": cispo,
    "dppo": dppo,
    "sapo": sapo,
}
"""The losses by their names in `algorithm.policy_loss`, which may also be an import path."""


def named_loss(settings: AlgorithmSection) -> Loss:
    """Returns the loss of the settings. Raises ConfigError when it cannot be imported."""
    return named_or_imported(settings.policy_loss, LOSSES, _SETTING)


def policy_weights(settings: AlgorithmSection, tokens: TokenTerms) -> Tensor:
    """Returns [C] the weight of each token in the policy loss, without gradient.

    It is the product of the corrections and masks that the settings ask for, and 1 without any. The
    KL term and the entropy bonus count every token.
    """
    weights = torch.ones_like(tokens.rollout_logprobs)
    if settings.correction is not None:
        weights = importance_correction(tokens, settings)
    if settings.rejects:
        weights = weights * geometric_mask(tokens, settings)
    if settings.off_policy_delta is not None:
        weights = weights * off_policy_mask(tokens, settings.off_policy_delta)
    return weights


def importance_correction(tokens: TokenTerms, settings: AlgorithmSection) -> Tensor:
    """Returns [C] weights, without gradient, that correct for the gap between engine and trainer.

    w_t = π_old(t) / μ(t). `truncate` gives min(w, cap): truncated importance sampling (Yao et al.
    2025). `mask` gives w where floor ≤ w ≤ cap, by default with the floor 1 / cap, and 0 elsewhere;
    this is IcePop (Ling team 2025, arXiv:2510.18855), whose bounds are 0.5 and 5.
    """
    weight = ratio_of(tokens.old_logprobs, tokens.rollout_logprobs).detach()
    cap = settings.correction_cap
    if settings.correction == "truncate":
        return weight.clamp(max=cap)
    lowest = 1 / cap if settings.correction_floor is None else settings.correction_floor
    outside = (weight > cap) | (weight < lowest)
    return torch.where(outside, torch.zeros_like(weight), weight)


def geometric_mask(tokens: TokenTerms, settings: AlgorithmSection) -> Tensor:
    """Returns [C] 1 on the tokens of rows that are kept, and 0 on those of rejected ones.

    A row is kept if low ≤ exp(1/L · Σ_t log(π_old(t) / μ(t))) ≤ high, the geometric mean over its L
    tokens (Liu et al. 2025, "When Speed Kills Stability"). verl calls this `seq_mean_k1` and uses
    [0.999, 1.001]. The product over a row would reject long ones whatever their tokens are.
    """
    mean = tokens.mean_of_row((tokens.old_logprobs - tokens.rollout_logprobs).detach())
    low = settings.geometric_low
    high = settings.geometric_high
    lowest = math.log(low) if low else -math.inf
    highest = math.log(high) if high else math.inf
    return ((mean >= lowest) & (mean <= highest)).float()


def off_policy_mask(tokens: TokenTerms, delta: float) -> Tensor:
    """OPSM, off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).

    Returns [C] M_t = 0 if A_t < 0 and 1/L · Σ_t log(μ(t) / π(t)) > delta, over the L tokens of the
    row, and 1 otherwise: the policy learns nothing more from a bad row that it has moved away from.
    `delta` is in nats per token.
    """
    mean = tokens.mean_of_row((tokens.rollout_logprobs - tokens.logprobs).detach())
    return ((tokens.advantages >= 0) | (mean <= delta)).float()


def kl_divergence(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimates KL(policy ‖ reference) per token from samples of the policy (Schulman,
    joschu.net/blog/kl-approx.html).

    With d = log π(t) − log π_ref(t): k1 = d (unbiased, high variance), k2 = ½ d² (biased, low
    variance), k3 = exp(−d) + d − 1 (unbiased, never negative). Returns [C] in nats.

    Args:
        logprobs: [C] in nats; the gradient flows through them.
        ref_logprobs: [C] in nats.
        estimator: k1, k2 or k3.
    """
    difference = (logprobs - ref_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.exp(-difference) + difference - 1


KL_HORIZON = 10_000
"""Time constant of an adaptive kl_coef, in rows (Ziegler et al. 2019)."""


def adapted_kl_coef(kl_coef: float, kl: float, target: float, rows: int) -> float:
    """Returns the KL coefficient β for the next batch (Ziegler et al. 2019, arXiv:1909.08593).

    β ← β · (1 + clip(kl / target − 1, −0.2, 0.2) · rows / KL_HORIZON): it rises while the policy is
    further from the reference than `target`.

    Args:
        kl_coef: β.
        kl: of the batch, in nats per token.
        target: for `kl`, in nats per token.
        rows: number of rows in the batch.
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return kl_coef * (1 + error * rows / KL_HORIZON)


def token_coefficients(
    aggregation: Aggregation,
    lengths: Tensor,
    *,
    total_tokens: int,
    total_rows: int,
    max_new_tokens: int,
) -> Tensor:
    """Returns [C] each token's coefficient c_t; the loss of a batch is Σ_t c_t · loss_t.

    It is a plain sum over all micro-batches and ranks, because the totals are the global batch's.
    With N rows, T tokens, and L tokens in the row of t:

    - `token_mean`, 1/T: every token counts the same (DAPO, arXiv:2503.14476).
    - `sequence_mean_token_mean`, 1/(N·L): every row counts the same (GRPO, arXiv:2402.03300).
    - `sequence_mean_token_sum`, 1/N: the mean over rows of their sums.
    - `constant`, 1/(N·max_new_tokens): Dr. GRPO (arXiv:2503.20783).

    Args:
        aggregation: one of the four.
        lengths: [C] L, the trained tokens of the row that each token belongs to.
        total_tokens, total_rows: T and N, of the global (mini-)batch.
        max_new_tokens: the longest completion that can be sampled.
    """
    divisors: dict[Aggregation, int | Tensor] = {
        "token_mean": total_tokens,
        "sequence_mean_token_mean": lengths * total_rows,
        "sequence_mean_token_sum": total_rows,
        "constant": total_rows * max_new_tokens,
    }
    return torch.ones_like(lengths, dtype=torch.float32) / divisors[aggregation]
