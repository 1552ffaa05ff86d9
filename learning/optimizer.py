"""The optimiser: AdamW or Muon, with clipping of the gradient norm and skipping of gradients that are not finite."""

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import ConfigError, ServiceError
from learning.sharding import full

log = logging.getLogger(__name__)


_STATE = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}
"""Tensors that torch's optimisers keep for a parameter."""


MAX_SKIPPED_UPDATES = 3
"""Updates in a row that may be skipped because the gradient is not finite."""


class NonFiniteGradients(ServiceError):
    """The gradient was NaN or infinite several times in a row."""

    code = "not_finite"


class Optimizer:
    """The optimiser of one model, which may be sharded. Raises ConfigError for Muon over several ranks' shares.

    Args:
        model: whose parameters are updated.
        kind: `adamw`, or `muon` (Jordan et al. 2024): hidden matrices by Muon with its step scaled to the size of AdamW's
            (Liu et al. 2025, arXiv:2502.16982), so one learning rate serves both; embeddings, heads and vectors by AdamW.
        betas: of AdamW.
        weight_decay: decoupled.
        max_grad_norm: the norm that gradients are clipped to.
    """

    def __init__(
        self,
        model: Any,
        kind: Literal["adamw", "muon"] = "adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._parameters = list(named.values())
        self._max_grad_norm, self._skipped_in_a_row = max_grad_norm, 0
        hidden = _hidden_matrices(model) if kind == "muon" else []
        if any(isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1 for parameter in hidden):
            raise ConfigError(
                "Muon orthogonalises whole matrices, which sharded ranks do not have",
                field="trainer.optimizer",
                value=kind,
                remedy="set trainer.shard_size 1, or take adamw",
            )
        taken = {id(parameter) for parameter in hidden}
        rest = [parameter for parameter in self._parameters if id(parameter) not in taken]
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, betas=betas, weight_decay=weight_decay, fused=True)]
        if hidden:
            self._parts.append(torch.optim.Muon(hidden, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def step(self, learning_rate: float) -> float:
        """Applies the gradients and returns their norm before clipping.

        A norm that is not finite changes nothing but is returned. Raises NonFiniteGradients after more than
        `MAX_SKIPPED_UPDATES` of them in a row.
        """
        if all(parameter.grad is None for parameter in self._parameters):
            for parameter in self._parameters:  # no row has a gradient, but momentum and weight decay go on, as on many ranks
                parameter.grad = torch.zeros_like(parameter)
        norm = float(full(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)))  # the one wait for a GPU
        if not math.isfinite(norm):
            self.zero_grad()
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row > MAX_SKIPPED_UPDATES:
                raise NonFiniteGradients(
                    f"{self._skipped_in_a_row} gradients in a row are not finite",
                    field="grad_norm",
                    value=norm,
                    remedy="lower the learning rate or resume from an earlier checkpoint",
                )
            log.warning("a gradient is not finite: the update is skipped")
            return norm
        self._skipped_in_a_row = 0
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the optimiser's tensors by "parameter.name"; empty before the first step. Sharded as the parameters are."""
        return {
            f"{self._names[id(parameter)]}.{key}": value
            for part in self._parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def empty_state(self, names: Collection[str]) -> dict[str, Tensor]:
        """Allocates the tensors `names` of a state_dict. Raises ConfigError for another kind of optimiser."""
        made: dict[str, Tensor] = {}
        for part in self._parts:
            for parameter in part.param_groups[0]["params"]:
                name = self._names[id(parameter)]
                for key in sorted(_STATE[type(part).__name__]):
                    if f"{name}.{key}" in names:
                        scalar = torch.zeros((), device=parameter.device)
                        made[f"{name}.{key}"] = scalar if key == "step" else torch.zeros_like(parameter, requires_grad=False)
        if set(made) != set(names):
            raise ConfigError(
                "the checkpoint's optimiser is of another kind",
                field="trainer.optimizer",
                value=" and ".join(type(part).__name__ for part in self._parts),
                remedy="keep the setting of the run that wrote it, or start with --trainer.resume false",
            )
        return made

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the state from tensors as `empty_state` allocates them."""
        for part in self._parts:
            part.state.clear()
            for parameter in part.param_groups[0]["params"]:
                prefix = f"{self._names[id(parameter)]}."
                keys = _STATE[type(part).__name__]
                state = {key: tensors[prefix + key] for key in sorted(keys) if prefix + key in tensors}
                if state:
                    part.state[parameter] = state


def _hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Returns the matrices between hidden states: neither embeddings nor the head."""
    outer = {
        id(parameter)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings())
        if layer is not None
        for parameter in layer.parameters()
    }
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [p for p in decoder.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outer]
