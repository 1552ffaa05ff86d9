"""Matrix products with a float32 result, whatever precision the model computes in."""

from typing import Any

import torch
from torch import Tensor, nn


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left [M, K] times right [K, N] in float32, never rounded to a lower precision.

    Products of two bfloat16 numbers are exact in float32, so two programs differ only in the order
    of summation.
    """
    on_cuda = left.is_cuda and torch.version.hip is None
    if on_cuda and left.dtype == torch.bfloat16:  # only CUDA has such a product
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def float32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the logits [..., V] of hidden [..., H] under a linear head with weight [V, H]."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = float32_product(hidden.flatten(0, -2), weight.t())
    if bias is not None:
        logits.add_(bias.float())
    return logits.unflatten(0, hidden.shape[:-1])


def make_float32_logits(model: Any) -> None:
    """Makes the plain linear head of a transformers model return float32 logits."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = lambda hidden: float32_logits(hidden, head.weight, head.bias)
