"""Policy losses and KL estimators, per token. Pure functions."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ±20 before exp, as in the public implementations, so that none overflows."""


@dataclass
class PolicyLoss:
    """What the clipped surrogate yields; every tensor has the shape of the log-probabilities."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """1 where the clipped term was the larger one, else 0."""


def clipped_surrogate(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with separate bounds (DAPO's clip-higher).

    Args:
        logprobs: [tokens] under the policy being trained, in nats; the gradient flows through them.
        behaviour_logprobs: [tokens] under the policy that sampled the tokens.
        advantages: [tokens]
        clip_low, clip_high: the probability ratio is clipped to [1 - clip_low, 1 + clip_high].
    """
    ratio = torch.exp((logprobs - behaviour_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(torch.maximum(unclipped, clipped), ratio, (clipped > unclipped).float())


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate of KL(policy ‖ reference) per token from samples of the policy (Schulman, joschu.net/blog/kl-approx.html).

    Args:
        logprobs: [tokens] in nats; the gradient flows through them.
        reference_logprobs: [tokens]
        estimator: k1 = lp − ref (unbiased, high variance), k2 = ½(lp − ref)² (biased, low variance),
            k3 = exp(ref − lp) − (ref − lp) − 1 (unbiased, never negative).
    """
    difference = (logprobs - reference_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.exp(-difference) + difference - 1
