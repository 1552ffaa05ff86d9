"""Expert parallelism: the ranks of a group own the experts of every layer together, each its own.

    own tokens [T] ─► tokens that some expert here reads [R] ─► own experts ─► own tokens [T]

A token travels once to every rank that owns one of its experts, with the numbers and weights of its
experts. There the module's own forward computes the own experts of all tokens; what they add to a
token is summed and sent back. A pass of a layer moves 2 · R · H numbers, whereas FSDP2 alone
gathers the weights of all experts.

Gradients travel back the same way. So those of an expert already contain the tokens of the whole
group, and FSDP2 sums them over the ranks that share it with this one.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from common.errors import ConfigError

_SETTING = "parallel.expert_size"
# The arguments of a module of experts in transformers: tokens [T, H], and the numbers and weights
# of each token's experts [T, k].
_FORWARDS = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],  # gpt-oss
)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold all experts of a layer, in parameters [experts, ...]."""
    return [module for module in model.modules() if _holds_experts(module)]


def _holds_experts(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    count = getattr(module, "num_experts", None)
    if not parameters or any(parameter.shape[:1] != (count,) for parameter in parameters):
        return False
    return list(inspect.signature(module.forward).parameters) in _FORWARDS


def divide_experts(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Divides the experts of every layer among the ranks of `mesh` [ranks]. Returns the modules of
    experts; each now holds and computes only this rank's experts.

    The parameters, on the meta device, become DTensors. Raises ConfigError for a model without such
    modules, and when the experts cannot be divided.
    """
    modules = expert_modules(model)
    if not modules:
        raise ConfigError(
            f"{type(model).__name__} has no layer that keeps all of its experts in one module",
            field=_SETTING,
            value=mesh.size(),
            remedy="set it to 1, or use a mixture of experts such as Qwen3-MoE, Mixtral, "
            "DeepSeek-V3, GLM-4.5 or gpt-oss",
        )
    for module in modules:
        if module.num_experts % mesh.size():
            raise ConfigError(
                f"the model's {module.num_experts} experts cannot be divided among "
                f"{mesh.size()} ranks",
                field=_SETTING,
                value=mesh.size(),
                remedy=f"use a divisor of {module.num_experts}",
            )
        _DividedExperts(module, mesh)
    return modules


class _DividedExperts:
    """Takes the place of a module's forward.

    `trainer.compile` leaves it out: how many tokens arrive is known only then.
    """

    def __init__(self, module: Any, mesh: DeviceMesh) -> None:
        self._module = module
        self._compute = module.forward
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._own = module.num_experts // mesh.size()
        self._first = self._own * mesh.get_local_rank()

        module.num_experts = self._own
        module.forward = torch.compiler.disable(self.forward)
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                part._parameters[name] = _divided(parameter, mesh)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [T, H] the weighted sum of each token's experts, as the whole module does. A
        collective.
        """
        # Expert e belongs to rank e // own of the group.
        owners = top_k_index // self._own
        ranks = torch.arange(self._size, device=owners.device)
        choices = (owners[:, :, None] == ranks).sum(1)  # [T, ranks] experts of a token on a rank
        needed = choices > 0
        sent, received, pairs = self._numbers(choices)

        # The tokens that a rank needs, rank by rank.
        # `_static`: the size is known, so that the device need not be waited for.
        token = torch.nonzero_static(needed.T, size=sum(sent))[:, 1]
        rows = self._exchange(hidden_states[token], received, sent)
        index = self._exchange(top_k_index[token], received, sent) - self._first
        weights = self._exchange(top_k_weights[token], received, sent)

        results = self._results(rows, index, weights, pairs)
        # The way back has the numbers of the way there, with the roles swapped.
        results = self._exchange(results, sent, received)
        return _sums(results, token, len(hidden_states))

    def _numbers(self, choices: Tensor) -> tuple[list[int], list[int], int]:
        """Returns how many tokens this rank sends to each rank and receives from each, and how many
        pairs of a token and an expert it computes, from the number of each token's experts on each
        rank [T, ranks]. A collective.
        """
        own = torch.stack([(choices > 0).sum(0), choices.sum(0)], dim=1)
        others = torch.empty_like(own)
        dist.all_to_all_single(others, own, group=self._group)
        numbers = torch.cat([own[:, :1], others], dim=1).T
        sent, received, pairs = numbers.tolist()  # the only wait for the device
        return sent, received, sum(pairs)

    def _results(self, rows: Tensor, index: Tensor, weights: Tensor, pairs: int) -> Tensor:
        """Returns [R, H] what this rank's experts add to the tokens.

        Args:
            rows: [R, H] tokens.
            index, weights: [R, k] the numbers of their experts, from this rank's first, and the
                weights.
            pairs: how many of these experts are on this rank.
        """
        if pairs == 0:
            # One token of zeros, so that gradients pass through this rank as through the others.
            row = rows.sum(0, keepdim=True)
            weight = weights.sum().view(1, 1)
            with _own_weights(self._module):
                nothing = self._compute(row, index.new_zeros(1, 1), weight)
            return nothing[:0].to(rows.dtype)

        is_own = (index >= 0) & (index < self._own)
        row, choice = torch.nonzero_static(is_own, size=pairs).unbind(1)
        with _own_weights(self._module):
            computed = self._compute(
                rows[row], index[row, choice, None], weights[row, choice, None]
            )
        return _sums(computed, row, len(rows))

    def _exchange(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Returns [sum of `received`, ...] the rows of all ranks for this one, from `rows`, of
        which `sent` go to each rank. With a gradient.
        """
        exchanged: Tensor = all_to_all_single_autograd(
            rows.contiguous(), list(received), list(sent), self._group
        )
        return exchanged


def _sums(results: Tensor, token: Tensor, count: int) -> Tensor:
    """Returns [count, H] the sums of the results [N, H] of each token, added up in float32."""
    sums = torch.zeros(count, results.shape[1], dtype=torch.float32, device=results.device)
    return sums.index_add(0, token, results.float()).to(results.dtype)


def _divided(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Returns a parameter on the meta device, divided along its first dimension."""
    own = parameter.new_empty(len(parameter) // mesh.size(), *parameter.shape[1:])
    divided = DTensor.from_local(
        own,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)


@contextmanager
def _own_weights(module: nn.Module) -> Iterator[None]:
    """Inside this context the module's parameters are this rank's experts, as tensors that any
    kernel can read.
    """
    held = [(part, dict(part._parameters)) for part in module.modules()]
    for part, parameters in held:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                part._parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        for part, parameters in held:
            part._parameters.update(parameters)
