"""Loads weights from safetensors files or memory, checked before anything is copied: a bad update
changes nothing. The files are those of `trainer.weights.versions`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ServiceError
from learning.hub_names import from_hub, hub_shapes, to_hub
from learning.loading import weight_files

_FITTING = "load files of the model that the engine was started with"


class BadWeights(ServiceError):
    """The weights do not fit this model (400); the old ones stay."""

    status = 400
    code = "bad_weights"


def load_into(module: Any, directory: Path) -> None:
    """Copies the safetensors of `directory` into the model in place.

    Raises BadWeights when a file is missing or damaged, a name is missing or unknown, a shape
    differs, or a number is not finite; the model is then unchanged.
    """
    wanted = hub_shapes(module, _own(module))
    found = _read(directory)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise BadWeights(
            f"{len(missing)} tensors are missing",
            field="model_path",
            value=missing[0],
            remedy=_FITTING,
        )
    check_tensors(module, found)
    copy_tensors(module, {name: found[name] for name in wanted})


def own_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the model's weights by their names in its files; a shared tensor has
    its first name.
    """
    own = _own(module)
    return to_hub(module, own.items(), own)


def _own(module: Any) -> dict[str, Tensor]:
    everything = module.state_dict()
    names = (name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    return {name: everything[name] for name in names if name in everything}


def check_tensors(module: Any, tensors: dict[str, Tensor]) -> None:
    """Raises BadWeights when a name is unknown, a shape differs, or a number is not finite."""
    known = hub_shapes(module, module.state_dict())
    unknown = sorted(tensors.keys() - known.keys())
    if unknown:
        reason = f"{len(unknown)} tensors do not belong to this model"
        raise BadWeights(reason, field="name", value=unknown[0], remedy=_FITTING)
    for name, tensor in tensors.items():
        if tensor.shape != known[name].shape:
            reason = f"the tensor's shape is wrong: the model has {list(known[name].shape)}"
            raise BadWeights(reason, field=name, value=list(tensor.shape), remedy=_FITTING)
        has_numbers = tensor.is_floating_point() and tensor.numel() > 0
        # Faster than `isfinite`, which makes a mask: both bounds are NaN if any number is.
        if has_numbers and not all(bound.isfinite() for bound in tensor.aminmax()):
            remedy = "look for a training step that diverged"
            raise BadWeights("the tensor has values that are not finite", field=name, remedy=remedy)


def copy_tensors(module: Any, tensors: dict[str, Tensor]) -> None:
    """Copies checked tensors into the model in place.

    Raises BadWeights for only part of a fused tensor of the model.
    """
    own = from_hub(module, tensors)
    everything = module.state_dict()
    for name, tensor in own.items():  # all of them before the first is copied
        if tensor.shape != everything[name].shape:
            message = f"only a part arrived: the model has {list(everything[name].shape)}"
            raise BadWeights(
                message, field=name, value=list(tensor.shape), remedy="send all parts in one update"
            )
    for name, tensor in own.items():
        everything[name].copy_(tensor)


def _read(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        for path in weight_files(directory) or [directory / "model.safetensors"]:
            tensors |= load_file(path)
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = f"the weights cannot be read: {error}"
        raise BadWeights(
            reason, field="model_path", value=str(directory), remedy=_FITTING
        ) from None
    return tensors
