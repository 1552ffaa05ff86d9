"""What a model does to the output of its head: some models scale logits (Granite, Cohere), some cap
them (Gemma 2).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError

# Outputs of a head that no cap bends yet, and of which nothing but a cap is left.
_SMALL = 2.0**-13
_LARGE = 2.0**40
# Relative error of a model that computes its logits in float32.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class FinalLogits:
    """The logits of a model as a function of the output z of its head: cap · tanh(scale · z / cap),
    or scale · z.
    """

    scale: float = 1.0
    cap: float | None = None

    def of(self, output: Tensor) -> Tensor:
        """Returns the logits for the head's `output`, of the same shape."""
        scaled = output * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def final_logits(model: Any) -> FinalLogits:
    """Returns what a transformers model does to the output of its head.

    Runs the code of the model around a made-up decoder and head, so that it needs neither weights
    nor a list of models. Raises ConfigError when the logits are anything but a scaled and capped
    output.
    """
    if type(model.get_output_embeddings()) is not nn.Linear:
        raise _refused(model, "the head of this model is not a plain linear layer")
    try:
        output, logits = _around_made_up_parts(model)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _refused(
            model,
            "the logits of this model are not those of a linear head on its decoder's states, "
            f"which is all that the trainer computes: {error}",
        ) from error

    # A small output is not bent by a cap, so the quotient is the scale; a large one is nothing but
    # the cap.
    scale = logits[0].item() / output[0].item()
    cap: float | None = None
    highest = logits[1].item()
    if highest < scale * output[1].item() / 1000:
        cap = highest
        scale = math.atanh(logits[0].item() / cap) * cap / output[0].item()
    found = FinalLogits(scale, cap)
    if not torch.allclose(logits, found.of(output), rtol=_ROUNDING, atol=0.0):
        reason = "this model changes the output of its head by more than a scale and a cap"
        raise _refused(model, f"{reason}: the trainer would learn another policy")
    return found


def _refused(model: Any, reason: str) -> ConfigError:
    return ConfigError(
        reason, field="model.name", value=model.config.name_or_path, remedy="use another model"
    )


def _around_made_up_parts(model: Any) -> tuple[Tensor, Tensor]:
    """Returns the output [V] of a made-up head, and the logits [V] that the model makes of it, in
    float64.
    """
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    # Powers of two, which no precision rounds.
    sizes = torch.linspace(-10, 12, width).round().exp2()
    states = torch.where(torch.arange(width) % 2 == 0, sizes, -1.5 * sizes).double()
    states[0] = _SMALL
    states[1] = _LARGE
    entry_of_token = torch.arange(vocabulary) % width
    # With a bias, scaled states are not the same as scaled logits.
    bias = 0.0 if getattr(head, "bias", None) is None else 1.0

    def made_up(hidden: Tensor) -> Tensor:
        return hidden[..., entry_of_token] * 2 + bias

    decoder.forward = lambda *_, **__: _Decoded((states[None, None],))
    head.forward = made_up
    try:
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    finally:
        del decoder.forward, head.forward
    return made_up(states), logits.flatten().double()


class _Decoded(tuple[Tensor]):
    """The output of a decoder: its hidden states, and None for everything else."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None
