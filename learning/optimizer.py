"""AdamW, with clipping of the gradient norm and skipping of gradients that are not finite."""

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import ConfigError, ServiceError
from common.settings.sections import OptimizerSection
from learning.rounded_adamw import RoundedAdamW
from learning.sharding import full

log = logging.getLogger(__name__)
# Tensors that AdamW keeps for a parameter.
_STATE = ("exp_avg", "exp_avg_sq", "step")
MAX_SKIPPED_UPDATES = 3
"""Consecutive updates that may be skipped because the gradient is not finite."""


class NonFiniteGradients(ServiceError):
    """The gradient was NaN or infinite several times in a row."""

    code = "not_finite"


class Optimizer:
    """AdamW over the trainable parameters of one model, which may be sharded.

    `rate_setting` is the name of the learning rate in messages.
    """

    def __init__(
        self,
        model: Any,
        settings: OptimizerSection,
        rate_setting: str = "optimizer.learning_rate",
    ) -> None:
        self._named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._parameters = list(self._named.values())
        # The parameters of divided experts are not sharded over the same ranks as the others, and
        # torch computes with no others together.
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        self._groups = list(by_mesh.values())
        self._max_grad_norm = settings.max_grad_norm
        self._skipped_in_a_row = 0
        self._rate_setting = rate_setting
        groups = [{"params": group} for group in self._groups]
        options: dict[str, Any] = {
            "betas": settings.adam_betas,
            "weight_decay": settings.weight_decay,
        }
        self._moments = getattr(torch, settings.moments)
        self._adam: torch.optim.Optimizer
        if settings.moments == "bfloat16":
            self._adam = RoundedAdamW(groups, **options)
        else:
            self._adam = torch.optim.AdamW(groups, fused=True, **options)

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def step(self, learning_rate: float) -> float:
        """Applies the gradients and returns their norm before clipping.

        If the norm is not finite, it is returned but nothing changes. Raises NonFiniteGradients
        after more than `MAX_SKIPPED_UPDATES` such norms in a row.
        """
        if all(parameter.grad is None for parameter in self._parameters):
            # No row: momentum and weight decay still apply, as on many ranks.
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
        # Of all gradients; a collective if they are sharded.
        norms: list[Tensor] = []
        for group in self._groups:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            norms.append(full(nn.utils.get_total_norm(gradients)))
        norm_tensor = nn.utils.get_total_norm(norms)
        for group in self._groups:
            nn.utils.clip_grads_with_norm_(group, self._max_grad_norm, norm_tensor)
        # A norm that is not finite is the sign of any gradient that is not, on any rank.
        norm = float(norm_tensor)  # the only GPU sync
        if not math.isfinite(norm):
            self.zero_grad()
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row > MAX_SKIPPED_UPDATES:
                raise NonFiniteGradients(
                    f"{self._skipped_in_a_row} gradients in a row are not finite: "
                    f"the last norm is {norm}",
                    field=self._rate_setting,
                    value=learning_rate,
                    remedy=f"lower {self._rate_setting} or optimizer.max_grad_norm, "
                    "or resume from an earlier checkpoint",
                )
            log.warning("a gradient is not finite: the update is skipped")
            return norm
        self._skipped_in_a_row = 0
        # The schedule is the caller's; AdamW keeps no rate of its own.
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        return norm

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the gradients that there are, by the names of their parameters."""
        for name, parameter in self._named.items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the optimiser's tensors by "parameter.name", sharded like the parameters; empty
        before a step.
        """
        return {
            f"{name}.{key}": value
            for name, parameter in self._named.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def empty_state(self, names: Collection[str]) -> dict[str, Tensor]:
        """Allocates the tensors `names` of a state_dict.

        Raises ConfigError if they belong to another kind of optimiser.
        """
        made: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            for key in _STATE:
                full_name = f"{name}.{key}"
                if full_name not in names:
                    continue
                if key == "step":
                    made[full_name] = torch.zeros((), device=parameter.device)
                else:
                    made[full_name] = torch.zeros_like(
                        parameter, requires_grad=False, dtype=self._moments
                    )
        if set(made) != set(names):
            other = min(set(names) ^ set(made))
            raise ConfigError(
                f"the checkpoint's optimiser state has other parameters ({other}) "
                "or is of another kind",
                field="trainer.run_dir",
                remedy="keep the settings of the run that wrote it, "
                "or start with checkpoint.resume false",
            )
        return made

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the state from tensors allocated by `empty_state`."""
        self._adam.state.clear()
        for name, parameter in self._named.items():
            state = {key: tensors[f"{name}.{key}"] for key in _STATE if f"{name}.{key}" in tensors}
            if state:
                self._adam.state[parameter] = state
