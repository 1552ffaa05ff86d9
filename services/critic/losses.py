"""The loss of the value model, a pure function over tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ValueLoss:
    """Of C tokens."""

    loss: Tensor
    """[C] with gradient to the values."""
    clipped: Tensor
    """[C] bool: the value has moved too far from the old one, so the loss no longer moves it."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """½·max((v − R)², (clip(v, v_old ± clip) − R)²) of every token; ½(v − R)² when `clip` is None.

    The squared error of Schulman et al. 2017 (arXiv:1707.06347); its clipping is that of PPO's reference implementation in
    OpenAI baselines.

    Args:
        values: [C] of the model as it is now, with gradient.
        old_values: [C] of the model before the update.
        returns: [C] what is to be predicted.
        clip: how far a value may move from its old one until its loss no longer falls.
    """
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    clipped = (bounded > error) & ((values - old_values).abs() > clip)  # inside the range both are equal up to rounding
    return ValueLoss(0.5 * torch.where(clipped, bounded, error), clipped)
