"""Shards models over the ranks with FSDP2 (`torch.distributed.fsdp.fully_shard`).

The unit of gathering and freeing is a decoder layer. Losses are divided by the tokens of the global
batch, so gradients are summed over the ranks, where FSDP2 would average them.
"""

from collections.abc import Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.errors import ConfigError
from common.models.memory import sums_once
from common.settings.sections import TrainerSection
from learning.experts import divide_experts, expert_modules
from learning.kernels import has_triton
from learning.linear_layers import is_by_rows
from learning.ranks import Ranks

# Most graphs of one class of layers, beyond which torch runs them uncompiled and logs that it does.
# torch's limit is 8 for all models of a process together. Gemma 3 needs 6, for two kinds of
# attention in each of training, scoring and recomputing, and a reference or critic 4 more.
_GRAPHS = 64
# Whether the limit is set by function, as since torch 2.12, where a setting would hold in one
# thread only.
_LIMIT_IS_AN_ARGUMENT = "recompile_limit" in signature(torch.compile).parameters


def layers(model: Any) -> list[Any]:
    """Returns the decoder layers of a transformers model."""
    has_decoder = hasattr(model, "get_decoder")
    body = model.get_decoder() if has_decoder else getattr(model, model.base_model_prefix)
    stack = getattr(body, "layers", None)
    if isinstance(stack, nn.ModuleList):
        return list(stack)
    names = set(model._no_split_modules or ())
    units = [module for module in model.modules() if type(module).__name__ in names]
    if not units:
        raise ConfigError(
            "this model does not say which of its modules are decoder layers",
            field="parallel.shard_size",
            value=type(model).__name__,
            remedy="set it to 1, "
            "and leave out trainer.compile and trainer.activation_checkpointing",
        )
    return units


def prepare(
    model: Any,
    settings: TrainerSection,
    trained: bool,
    device: torch.device,
    *,
    divides_experts: bool = False,
) -> None:
    """Applies `trainer.compile` and `trainer.activation_checkpointing` to every decoder layer,
    without renaming anything. Experts that are to be divided are compiled by themselves.
    """
    # `auto` computes nothing again: nobody knows the memory, as on a CPU.
    checkpointing = settings.activation_checkpointing if trained else False
    compiled = has_triton(device.type) if settings.compile == "auto" else settings.compile
    if not (compiled or checkpointing in (True, "selective")):
        return
    for layer in layers(model):
        # Calls over rows would be a graph each, and leave a layer that is computed again in parts:
        # then what is around the linear layer is compiled, mostly norms and an MLP.
        in_one_graph = not any(is_by_rows(module) for module in layer.modules())
        if checkpointing == "selective":
            # Inside the compiled module, so that the compiler knows what to keep.
            layer.forward = partial(
                checkpoint,
                layer.forward,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, _products()),
            )
        if compiled and in_one_graph:
            layer.forward = _compiled(layer.forward)
        elif compiled and checkpointing != "selective":  # which sees operators, not graphs
            for part in layer.children():
                if not is_by_rows(part):
                    part.forward = _compiled(part.forward)
        if checkpointing is True:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if compiled and divides_experts and checkpointing != "selective":
        _compile_experts(model)


def _compile_experts(model: Any) -> None:
    """Compiles the experts of every layer, whose exchange `torch.compile` leaves out, and with it
    what is inside.
    """
    for module in expert_modules(model):
        module.forward = _compiled(module.forward)


def _compiled(forward: Any) -> Any:
    """Compiles the forward of a layer, for shapes that change."""
    if _LIMIT_IS_AN_ARGUMENT:
        return torch.compile(forward, dynamic=True, recompile_limit=_GRAPHS)
    torch._dynamo.config.recompile_limit = _GRAPHS
    return torch.compile(forward, dynamic=True)


@cache
def _products() -> list[Any]:
    """Returns the operators whose results a selective activation checkpoint keeps."""
    import torch.nn.attention.varlen  # defines torch_attn

    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._grouped_mm.default,
        torch.ops.torch_attn._varlen_attn.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]


def shard(
    root: nn.Module,
    model: Any,
    ranks: Ranks,
    *,
    low_precision: bool,
    offload: bool,
    trained: bool,
    gathers_once: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Shards `root`, whose forward runs the transformers model `model` inside it.

    With `low_precision`, passes run in bfloat16 and gradients are reduced in float32; modules in
    `exact` compute in float32. `offload` keeps parameters, gradients and optimiser state in CPU
    memory. The gathered weights of a model that is not `trained` are freed after every pass; with
    `gathers_once`, those of a trained one are freed after the last backward pass of an update.
    """
    mesh = ranks.mesh()
    experts: list[nn.Module] = []
    if ranks.expert_size > 1:
        expert_mesh = ranks.mesh(of_experts=True)
        experts = divide_experts(model, expert_mesh["expert"])
    policy = OffloadPolicy()
    if offload:
        policy = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    mixed = MixedPrecisionPolicy()
    if low_precision:
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    outer = MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, cast_forward_inputs=False)
    gathers_once = gathers_once and trained
    units = [
        # Divided experts are sharded once more, over the ranks that own the same ones. Their inputs
        # are cast with those of their layer.
        *((module, expert_mesh[expert_mesh.mesh_dim_names[:-1]], outer) for module in experts),
        *((layer, mesh, mixed) for layer in layers(model)),
    ]
    for module, over, precision in units:
        fully_shard(
            module,
            mesh=over,
            mp_policy=precision,
            offload_policy=policy,
            reshard_after_forward=not gathers_once,
        )
    for module in exact:
        fully_shard(module, mesh=mesh, mp_policy=plain, offload_policy=policy)
    # Embedding and head are the root's own; a model that is not trained needs them once a pass.
    fully_shard(
        root, mesh=mesh, mp_policy=outer, offload_policy=policy, reshard_after_forward=not trained
    )
    root.gathers_once = gathers_once
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the tokens of the global batch already: sum, and do not average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sum_gradients_after(root: nn.Module, ranks: Ranks, last: bool) -> None:
    """Prepares a sharded model for a micro-batch's backward pass; only the `last` must sum
    gradients over all ranks.

    The others accumulate gradients of the whole model if a rank has room for them (`sums_once`).
    Otherwise every pass sums them within a copy of the model, and only the last one across the
    copies.
    """
    if not isinstance(root, FSDPModule):
        return
    # With room for whole gradients, only the last micro-batch communicates.
    trained = sum(parameter.numel() for parameter in root.parameters() if parameter.requires_grad)
    if sums_once(trained, ranks.world_size):
        root.set_requires_gradient_sync(last)
    else:
        root.set_requires_all_reduce(last)
    if root.gathers_once:
        root.set_reshard_after_backward(last)


def reshard(root: nn.Module) -> None:
    """Frees the gathered weights of a sharded model, so that its parameters are this rank's
    share.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name; of tied tensors only the first.

    For a sharded model they are DTensors with this rank's share, even between a forward and a
    backward pass.
    """
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's share of a tensor; the whole tensor if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Returns the whole tensor. A collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    if "expert" in tensor.device_mesh.mesh_dim_names:
        # First a rank's experts, then all of them: as torch would, which also warns that it does.
        *others, experts = tensor.placements
        tensor = tensor.redistribute(placements=[Replicate() for _ in others] + [experts])
    return tensor.full_tensor()


def region(tensor: Tensor) -> tuple[slice, ...]:
    """Returns the slices of the whole tensor that this rank's share covers."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
