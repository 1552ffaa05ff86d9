"""The layouts in which an engine may hold its parameters, in terms of the tensors that were sent to
it.

The embedded engine uses the names in the files. SGLang stacks projections (`qkv_proj`) and experts
(`w13_weight`), pads the vocabulary, and shards parameters across GPUs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that SGLang fuses along dimension 0."""
_EXPERTS = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
"""Parameters that hold all experts, and the names of each expert's parts in model files."""
_RENAMED = {".self_attn.proj.": ".self_attn.out_proj."}
"""SGLang's names for modules of vision towers, and their names in model files."""
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "position_embedding.weight")
"""Parameters that SGLang pads with rows of zeros."""
_VOCABULARY_ROWS = 64
"""It pads them to a multiple of this number of rows."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
"""An engine converts the tensors to its own precision."""


@dataclass(frozen=True)
class Part:
    """What sent tensors contribute to a parameter, which is its parts one after the other in
    memory.
    """

    names: tuple[str, ...]
    """One tensor, or several that the engine interleaves."""
    take: Callable[..., Tensor]
    """Takes the rank's share of these tensors."""

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the part of the parameter that these tensors make."""
        return self.take(*(tensors[name] for name in self.names))

    def converted(self, dtype: torch.dtype) -> "Part":
        """Returns the part in another precision."""
        return Part(self.names, lambda *tensors: self.take(*tensors).to(dtype))


Way = Sequence[Part]
"""A layout of a parameter."""
Describe = Callable[[], Way]
"""Describes a layout: a mixture has too many experts to describe the layouts that no engine
uses."""


def parts_of(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that make up an engine's parameter, in order; [] for an
    unknown one.
    """
    if name in tensors:
        return [name]
    for sglang_module, module in _RENAMED.items():
        renamed = name.replace(sglang_module, module)
        if renamed in tensors:
            return [renamed]
    for fused, parts in _FUSED.items():
        found = [name.replace(fused, part) for part in parts]
        if f".{fused}." in name and all(part in tensors for part in found):
            return found
    prefix, _, last = name.rpartition(".")
    for parts in _EXPERTS.get(last, ()):
        of_experts = list(_of_every_expert(prefix, parts, tensors))
        if of_experts:
            return of_experts
    return []


def _of_every_expert(
    prefix: str, parts: Sequence[str], tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    for expert in count():
        names = [f"{prefix}.{expert}.{part}.weight" for part in parts]
        if not all(name in tensors for name in names):
            return
        yield from names


def ways(name: str, tensors: Mapping[str, Tensor], rank: int, size: int) -> list[Describe]:
    """Returns functions that describe the layouts in which rank `rank` of `size` may hold a
    parameter, likeliest first.
    """
    names = parts_of(name, tensors)
    last = name.rpartition(".")[2]
    if last in _EXPERTS and name not in tensors:
        found = _ways_of_experts(names, 2 if last == "w13_weight" else 1, rank, size)
    else:
        of_parameter = _ways(name, names, tensors, rank=rank, size=size)
        found = [partial(list, way) for way in of_parameter]
    layouts = list(found)
    sent_dtype = tensors[names[0]].dtype
    if sent_dtype.is_floating_point:
        for dtype in _DTYPES:
            if dtype != sent_dtype:
                layouts += [partial(_converted, describe, dtype) for describe in found]
    return layouts


def _converted(describe: Describe, dtype: torch.dtype) -> Way:
    return [part.converted(dtype) for part in describe()]


def _ways(
    name: str, names: Sequence[str], tensors: Mapping[str, Tensor], rank: int, size: int
) -> Iterator[Way]:
    first, *rest = names
    parts = [tensors[part] for part in names]
    if name.endswith(_VOCABULARY):
        yield [Part((first,), partial(_vocabulary_share, rank=rank, size=size))]
    elif size > 1:
        own = Part((first,), partial(_share, dim=0, rank=rank, size=size))
        for copies in range(1, size + 1):  # as many GPUs may share each key-value head
            if size % copies:
                continue
            shares = size // copies
            first_divides = len(parts[0]) % size == 0
            rest_divides = all(len(part) % shares == 0 for part in parts[1:])
            if first_divides and rest_divides:
                shared = partial(_share, dim=0, rank=rank // copies, size=shares)
                yield [own, *(Part((name_of_part,), shared) for name_of_part in rest)]
        has_columns = not rest and parts[0].dim() > 1
        if has_columns and parts[0].shape[1] % size == 0:
            yield [Part((first,), partial(_share, dim=1, rank=rank, size=size))]
    yield [Part((name_of_part,), _whole) for name_of_part in names]


def _ways_of_experts(
    names: Sequence[str], parts_of_expert: int, rank: int, size: int
) -> list[Describe]:
    """[experts, …]: this rank's rows (gate and up) or columns (down) of every expert.

    Some kernels put up before gate, and some transpose every matrix.
    """
    experts = [
        names[begin : begin + parts_of_expert] for begin in range(0, len(names), parts_of_expert)
    ]
    has_gate = parts_of_expert == 2
    take = partial(_share, dim=0 if has_gate else 1, rank=rank, size=size)
    orders = (1, -1) if has_gate else (1,)
    layouts: list[Describe] = []
    for build in (_stacked, _turned):
        layouts += [partial(build, experts, take, order) for order in orders]
    return layouts


def _stacked(experts: Sequence[Sequence[str]], take: Callable[[Tensor], Tensor], order: int) -> Way:
    parts: list[Part] = []
    for expert in experts:
        parts += [Part((name,), take) for name in expert[::order]]
    return parts


def _turned(experts: Sequence[Sequence[str]], take: Callable[[Tensor], Tensor], order: int) -> Way:
    return [Part(tuple(expert[::order]), partial(_transposed, take=take)) for expert in experts]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _share(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    length = -(-tensor.shape[dim] // size)
    own = slice(rank * length, (rank + 1) * length)
    return tensor[own] if dim == 0 else tensor[:, own]


def _transposed(*tensors: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([take(tensor) for tensor in tensors]).t()


def _vocabulary_share(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Returns the rank's rows of a vocabulary that is padded with zeros."""
    padded = _rounded_up(len(tensor), _VOCABULARY_ROWS)
    if padded % size:  # the rows do not divide evenly among the GPUs
        padded = _rounded_up(len(tensor), _VOCABULARY_ROWS * size)
    rows = padded // size
    own = tensor[rank * rows : (rank + 1) * rows]
    if len(own) == rows:
        return own
    padding = own.new_zeros(rows - len(own), *own.shape[1:])
    return torch.cat([own, padding])


def _rounded_up(number: int, multiple: int) -> int:
    return number + -number % multiple
