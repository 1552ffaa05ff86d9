"""The weights of a policy as the engines load them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.settings.config import Config
from learning.hub_names import to_hub
from learning.ranks import Ranks
from learning.sharding import full, named_tensors
from trainer.policy.lora import adapter_tensors, base_tensors, merged_tensors
from trainer.policy.scorer import computes_in_bfloat16


def published_weights(model: Any, config: Config, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights to publish, in the layout of the model's files and the engines' precision.
    A collective.

    With LoRA these are the adapter's, with PEFT's names, or the model's with the adapter merged. Of
    tied tensors only the first is yielded, as in hub files. A tensor is valid until the next
    update.
    """
    lora = config.lora
    in_bfloat16 = computes_in_bfloat16(config.model, ranks)
    tensors = named_tensors(model)

    def published(tensor: Tensor) -> Tensor:
        reduced = in_bfloat16 and tensor.is_floating_point()
        dtype = torch.bfloat16 if reduced else tensor.dtype
        return tensor.detach().to(ranks.device, dtype)

    if lora.publishes_adapter:
        for name, tensor in adapter_tensors(model):
            yield name, full(published(tensor))
        return

    if not lora.rank:
        whole = ((name, full(published(tensor))) for name, tensor in tensors.items())
        yield from to_hub(model, whole, tensors)
        return

    # W + scale × B A is computed in the precision of the master weights, and rounded once.
    exact = ((name, full(tensor.detach().to(ranks.device))) for name, tensor in tensors.items())
    merged = merged_tensors(exact, lora.alpha / lora.rank)
    rounded = ((name, published(tensor)) for name, tensor in merged)
    yield from to_hub(model, rounded, base_tensors(tensors))
