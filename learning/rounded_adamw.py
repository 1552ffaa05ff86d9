"""AdamW whose moments are stored in bfloat16: 4 bytes a parameter instead of 8.

    m ← β₁ m + (1 − β₁) g            in float32, from the stored value
    v ← β₂ v + (1 − β₂) g²
    θ ← θ − λ (w θ + m̂ / (√v̂ + ε))   m̂ and v̂: before they are rounded
    store m and v in bfloat16, rounded up or down at random, right in the mean

A moment changes by less than the spacing of bfloat16 (2⁻⁸ of the number) in a step, so that
rounding to the nearest would leave it where it is: with β₂ = 0.999, v would never fall.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from learning.sharding import local

# AdamW's ε, as in torch.
_EPS = 1e-8


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Returns float32 numbers in bfloat16, each rounded to one of its two neighbours, with the
    nearer one the likelier, so that the mean is the number.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    # bfloat16 is the upper half of float32.
    return ((bits + noise) & -(1 << 16)).view(torch.float32).bfloat16()


class RoundedAdamW(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not typed here
    """AdamW with moments in bfloat16. The noise depends on the number of the step alone, so that a
    run that is resumed is the same, and copies of a model stay equal.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: None = None) -> None:
        """Applies the gradients."""
        with torch.no_grad():
            for group in self.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is not None:
                        self._update(group, parameter, index)

    def _update(self, group: dict[str, Any], parameter: nn.Parameter, index: int) -> None:
        """Applies the gradient of the parameter at `index` of a group."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        number = int(state["step"])
        assert parameter.grad is not None
        gradient = local(parameter.grad).float()
        weights = local(parameter)
        generator = torch.Generator(weights.device).manual_seed(number << 20 | index)

        first_beta, second_beta = group["betas"]
        first = local(state["exp_avg"]).float().lerp_(gradient, 1 - first_beta)
        second = local(state["exp_avg_sq"]).float().lerp_(gradient.square(), 1 - second_beta)
        local(state["exp_avg"]).copy_(rounded(first, generator))
        local(state["exp_avg_sq"]).copy_(rounded(second, generator))

        scale = second.div_(1 - second_beta**number).sqrt_().add_(_EPS)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.addcdiv_(first, scale, value=-group["lr"] / (1 - first_beta**number))
