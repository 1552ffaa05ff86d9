"""Advantages: how much better than its peers a completion was. Pure functions."""

import torch
from torch import Tensor


def group_normalised(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (Shao et al. 2024, arXiv:2402.03300, eq. 2): (r - mean) / (std + eps) within each group.

    Args:
        rewards: [groups, n] with n ≥ 2.
        eps: added to the standard deviation, which is unbiased (ddof = 1) as in the public implementations.

    Returns:
        [groups, n]; a group of equal rewards gets exactly 0.

    Raises:
        ValueError: a group of one has nothing to be compared with.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"a group-relative advantage needs groups of at least 2 completions, got shape {tuple(rewards.shape)}")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = centred / (rewards.std(dim=1, keepdim=True, correction=1) + eps)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, torch.zeros_like(advantages), advantages)
