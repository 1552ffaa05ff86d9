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
_VOCABULARY, _VOCABULARY_ROWS = (
    ("embed_tokens.weight", "lm_head.weight", "position_embedding.weight"),
    64,
)
"""SGLang pads these with rows of zeros to a multiple of this number of rows."""
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
    for other, module in _RENAMED.items():
        if other in name and (sent := name.replace(other, module)) in tensors:
            return [sent]
    for fused, parts in _FUSED.items():
        found = [name.replace(fused, part) for part in parts]
        if f".{fused}." in name and all(part in tensors for part in found):
            return found
    prefix, _, last = name.rpartition(".")
    for parts in _EXPERTS.get(last, ()):
        if found := list(_of_every_expert(prefix, parts, tensors)):
            return found
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
        found = [partial(list, way) for way in _ways(name, names, tensors, rank, size)]
    given = tensors[names[0]].dtype
    others = [dtype for dtype in _DTYPES if dtype != given] if given.is_floating_point else []
    return found + [partial(_converted, make, dtype) for dtype in others for make in found]


def _converted(make: Describe, dtype: torch.dtype) -> Way:
    return [part.converted(dtype) for part in make()]


def _ways(
    name: str, names: Sequence[str], tensors: Mapping[str, Tensor], rank: int, size: int
) -> Iterator[Way]:
    first, *rest = names
    parts = [tensors[part] for part in names]
    if name.endswith(_VOCABULARY):
        yield [Part((first,), partial(_vocabulary_share, rank=rank, size=size))]
    elif size > 1:
        for copies in (
            copies for copies in range(1, size + 1) if size % copies == 0
        ):  # GPUs may share key-value heads
            if all(
                len(part) % (size if i == 0 else size // copies) == 0
                for i, part in enumerate(parts)
            ):
                own = Part((first,), partial(_share, dim=0, rank=rank, size=size))
                shared = partial(_share, dim=0, rank=rank // copies, size=size // copies)
                yield [own, *(Part((each,), shared) for each in rest)]
        if not rest and parts[0].dim() > 1 and parts[0].shape[1] % size == 0:
            yield [Part((first,), partial(_share, dim=1, rank=rank, size=size))]
    yield [Part((each,), _whole) for each in names]


def _ways_of_experts(names: Sequence[str], each: int, rank: int, size: int) -> list[Describe]:
    """[experts, …]: this rank's rows (gate and up) or columns (down) of every expert.

    Some kernels put up before gate, and some transpose every matrix.
    """
    experts = [names[i : i + each] for i in range(0, len(names), each)]
    take = partial(_share, dim=0 if each == 2 else 1, rank=rank, size=size)
    orders = (1, -1) if each == 2 else (1,)
    return [
        partial(build, experts, take, order) for build in (_stacked, _turned) for order in orders
    ]


def _stacked(experts: Sequence[Sequence[str]], take: Callable[[Tensor], Tensor], order: int) -> Way:
    return [Part((name,), take) for expert in experts for name in expert[::order]]


def _turned(experts: Sequence[Sequence[str]], take: Callable[[Tensor], Tensor], order: int) -> Way:
    return [Part(tuple(expert[::order]), partial(_transposed, take=take)) for expert in experts]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _share(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    each = -(-tensor.shape[dim] // size)
    own = slice(rank * each, (rank + 1) * each)
    return tensor[own] if dim == 0 else tensor[:, own]


def _transposed(*tensors: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([take(tensor) for tensor in tensors]).t()


def _vocabulary_share(tensor: Tensor, rank: int, size: int) -> Tensor:
    multiple = _VOCABULARY_ROWS
    if (
        len(tensor) + -len(tensor) % multiple
    ) % size:  # the rows do not divide evenly among the GPUs
        multiple *= size
    rows = (len(tensor) + -len(tensor) % multiple) // size
    own = tensor[rank * rows : (rank + 1) * rows]
    return (
        torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])]) if len(own) < rows else own
    )
