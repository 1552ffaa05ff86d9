"""Converts between a model's tensors and the names and shapes in its files, as the hub and the
engines use them.

transformers renames tensors when it loads a model, and stacks or splits some: the experts of a
mixture become one tensor. It stores the conversions that the files needed in `_weight_conversions`
and reverses them in `save_pretrained`. This module reverses them one tensor at a time, as
publishing and checkpoints gather the tensors.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

# Names that multimodal models give to their language model; its tensors' names begin with them, or
# with `model.` and them.
_PARTS = ("language_model", "text_model")
LANGUAGE_PART = {rf"^{part}\.": "" for part in _PARTS} | {
    rf"^model\.{part}\.": "model." for part in _PARTS
}
"""These names as those of a language model alone, for `from_pretrained`."""


def of_language_part(name: str) -> str:
    """Returns the name of a module of a multimodal model in its language model alone."""
    for pattern, replacement in LANGUAGE_PART.items():
        name = re.sub(pattern, replacement, name)
    return name


def set_conversions(model: Any, own: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, str]:
    """Sets the conversions that files with tensors of these `names` need. Returns, for each of
    these names that belongs to the model, that of the model's tensor which is made of it:
    `…experts.3.gate_proj.weight` becomes a part of `…experts.gate_up_proj`.

    `own` are the model's tensors by their names in the model, which may be a part of the one in the
    files.
    """
    chosen = sorted(names, key=dot_natural_key)
    own_names: dict[str, str] = {}
    conversions: list[Any] = []
    # Once more without the names of other parts, as these may need other conversions.
    for _ in range(2):
        conversions = [*_part_prefix(own, chosen), *get_model_conversion_mapping(model)]
        renamings, converters = _by_kind(conversions)
        for name in chosen:
            # This also notes which conversions apply.
            own_names[name], _ = _renamed(name, renamings, converters, model=model, own=own)
        own_names = {name: own_name for name, own_name in own_names.items() if own_name in own}
        chosen = list(own_names)
    model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
    return own_names


def _part_prefix(own: Mapping[str, Tensor], names: Iterable[str]) -> list[PrefixChange]:
    """Returns the change that removes the language model's prefix from names in a multimodal
    model's files; empty unless the model with the tensors `own` is only its language part.
    """
    for part in _PARTS:
        if any(f"{part}." in name for name in own):
            return []
        for before, start in (("model", f"model.{part}."), (None, f"{part}.")):
            if any(name.startswith(start) for name in names):
                return [PrefixChange(prefix_to_remove=part, model_prefix=before)]
    return []


Sources = str | list[list[str]]
"""Where a tensor of the model comes from: its name in the files, or for each of the experts that
are stacked in it the names of its parts."""


def sources(model: Any, name: str, tensor: Tensor) -> Sources | None:
    """Returns where a tensor of the model comes from; None if it is neither renamed nor stacked.
    The tensor itself is not read, and may be on the meta device.
    """
    names = [hub_name for hub_name, _ in to_hub(model, [(name, tensor)], [name])]
    converter = _converter_to(model, name)
    if converter is None:
        return names[0]
    first, *others = converter.operations
    # The two conversions that can be undone for some experts alone: stacking, after joining what
    # belongs to one expert (such as gate and up projection).
    stacks_experts = isinstance(first, MergeModulelist) and first.dim == 0
    within_experts = all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
    if not (stacks_experts and within_experts):
        return None

    count = len(tensor)
    of_first = [hub_name for hub_name, _ in to_hub(model, [(name, tensor[:1])], [name])]
    if names[::count] != of_first:
        return None
    return [names[expert::count] for expert in range(count)]


def _converter_to(model: Any, name: str) -> Any:
    """Returns the conversion that makes the tensor `name` of the model; None for one that is only
    renamed.
    """
    for converter in _by_kind(_conversions(model))[1]:
        _, pattern = rename_source_key(name, [], [converter.reverse_transform()])
        if pattern is not None:
            return converter
    return None


def to_hub(
    model: Any, named: Iterable[tuple[str, Tensor]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in the form of the model's files. `names` are the names of all tensors in
    `named`.
    """
    conversions = _conversions(model)
    if not conversions:
        yield from named
        return
    _, forward = _by_kind(conversions)
    converters = [converter.reverse_transform() for converter in reversed(forward)]
    lacking = Counter(rename_source_key(name, [], converters)[0] for name in names)
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        key = rename_source_key(name, [], converters)[0]
        held.setdefault(key, {})[name] = tensor
        lacking[key] -= 1
        # Complete: everything of the combined tensor has come.
        if lacking[key] == 0:  # some tensors in the files combine several of the model's
            yield from revert_weight_conversion(model, held.pop(key)).items()


def hub_shapes(model: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors without memory that have the names, shapes and dtypes of the model's
    files.
    """
    empty = (
        (name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for name, tensor in own.items()
    )
    return dict(to_hub(model, empty, own))


def from_hub(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors from the form of the model's files to the model's own; a combined tensor
    needs all its parts.
    """
    conversions = _conversions(model)
    if not conversions:
        return dict(tensors)
    own = model.state_dict()
    renamings, converters = _by_kind(conversions)
    converter_of: dict[str, Any] = {}
    for converter in converters:
        for pattern in converter.source_patterns:
            converter_of[pattern] = converter

    work: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = _renamed(name, renamings, converters, model=model, own=own)
        if pattern is None:
            work[target] = WeightRenaming(name, target)
        elif target not in work:
            work[target] = deepcopy(converter_of[pattern])
        work[target].add_tensor(target, name, pattern or name, tensors[name])

    found: dict[str, Tensor] = {}
    for target, conversion in work.items():
        for name, tensor in conversion.convert(target, model=model, config=model.config).items():
            found[name] = tensor[0] if isinstance(tensor, list) else tensor
    return found


def _renamed(
    name: str, renamings: list[Any], converters: list[Any], *, model: Any, own: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """Returns the name that a tensor of the files has in the model, and the pattern of the
    converter that changes the tensor; None as the pattern if it is only renamed.
    """
    # By position, because releases of transformers name the parameters differently.
    target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
    return target, pattern


def _conversions(model: Any) -> list[Any]:
    return getattr(model, "_weight_conversions", None) or []


def _by_kind(conversions: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the conversions that rename, and those that change tensors."""
    renamings: list[Any] = []
    converters: list[Any] = []
    for conversion in conversions:
        if isinstance(conversion, WeightRenaming):
            renamings.append(conversion)
        elif isinstance(conversion, WeightConverter):
            converters.append(conversion)
    return renamings, converters
