"""The layouts in which an engine may hold its parameters, in terms of the tensors that were sent to
it.

    sent                                     rank 1 of 2 holds
    …q_proj.weight [8, 6]                    …qkv_proj.weight = rows 4 to 7 of q, then rows 2 and 3
    …k_proj.weight, …v_proj.weight [4, 6]        of k, then rows 2 and 3 of v
    …o_proj.weight [6, 8]                    …o_proj.weight = columns 4 to 7

The embedded engine uses the names in the files. SGLang stacks projections (`qkv_proj`) and experts
(`w13_weight`), pads the vocabulary, and shards parameters across GPUs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

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
_PLACES = {"model.": "model.language_model.", "language_model.": "model.language_model."}
"""Where SGLang has the language model of a multimodal one, and where its files have it."""
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "position_embedding.weight")
"""Parameters that SGLang pads with rows of zeros."""
_VOCABULARY_ROWS = 64
"""It pads them to a multiple of this number of rows."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
"""An engine converts the tensors to its own precision."""


@dataclass(frozen=True)
class Sharding:
    """How the ranks of an engine share its parameters, besides tensor parallelism."""

    expert_groups: int = 1
    """Groups of ranks that hold different experts (SGLang's `--ep-size`)."""
    attention_groups: int = 1
    """Groups of ranks that each hold all of attention (`--enable-dp-attention`, `--dp-size`)."""


@dataclass(frozen=True)
class Part:
    """What sent tensors contribute to a parameter, which is its parts one after the other in
    memory.
    """

    names: tuple[str, ...]
    """One tensor, or several that the engine interleaves."""
    take: Callable[..., Tensor]
    """Takes the rank's share of these tensors."""


@dataclass(frozen=True)
class ParameterLayout:
    """A layout in which an engine may hold a parameter, in its own precision."""

    parts: Sequence[Part]
    dtype: torch.dtype | None = None
    """None: that in which the tensors were sent."""

    @property
    def names(self) -> set[str]:
        """The tensors that it is made of."""
        return {name for part in self.parts for name in part.names}

    def of(self, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yields the parts of the parameter that these tensors make."""
        for part in self.parts:
            share = part.take(*(tensors[name] for name in part.names))
            yield share if self.dtype is None else share.to(self.dtype)


TENSOR_PARALLEL = Sharding()


def parts_of(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that make up an engine's parameter, in order; [] for an
    unknown one.
    """
    names = [name, *(name.replace(module, file) for module, file in _RENAMED.items())]
    names += [
        in_files + name.removeprefix(place)
        for place, in_files in _PLACES.items()
        if name.startswith(place)
    ]
    for each in names:
        found = _parts_of(each, tensors)
        if found:
            return found
    return []


def _parts_of(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    if name in tensors:
        return [name]
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


def layouts(
    name: str,
    tensors: Mapping[str, Tensor],
    rank: int,
    size: int,
    *,
    sharding: Sharding = TENSOR_PARALLEL,
) -> Iterator[ParameterLayout]:
    """Yields the layouts in which rank `rank` of `size` may hold a parameter, likeliest first."""
    names = parts_of(name, tensors)
    last = name.rpartition(".")[2]
    sharded: list[list[Part]] = []
    if last in _EXPERTS and name not in tensors:
        has_gate = last == "w13_weight"
        step = 2 if has_gate else 1
        # Consecutive ranks form a group, which holds its share of the experts.
        group = size // sharding.expert_groups
        count_of_group = len(names) // step // sharding.expert_groups * step
        first = rank // group * count_of_group
        own = names[first : first + count_of_group]
        sharded += _of_experts(own, has_gate=has_gate, rank=rank % group, size=group)
    else:
        # All ranks share it, or those of an attention group do.
        for shares in sorted({size, size // sharding.attention_groups}, reverse=True):
            sharded += _of_parameter(name, names, tensors, rank=rank % shares, size=shares)

    dtypes: list[torch.dtype | None] = [None]
    sent_dtype = tensors[names[0]].dtype
    if sent_dtype.is_floating_point:
        dtypes += [dtype for dtype in _DTYPES if dtype != sent_dtype]
    for dtype in dtypes:
        for parts in sharded:
            yield ParameterLayout(parts, dtype)


def _of_parameter(
    name: str, names: Sequence[str], tensors: Mapping[str, Tensor], *, rank: int, size: int
) -> Iterator[list[Part]]:
    first, *rest = names
    lengths = [len(tensors[part]) for part in rest]
    tensor = tensors[first]
    if name.endswith(_VOCABULARY):
        yield [Part((first,), partial(_vocabulary_share, rank=rank, size=size))]
    elif size > 1:
        own = Part((first,), partial(_share, dim=0, rank=rank, size=size))
        for copies in range(1, size + 1):  # as many GPUs may share each key-value head
            shares = size // copies
            divides = size % copies == 0 and all(length % shares == 0 for length in lengths)
            if divides and len(tensor) % size == 0:
                shared = partial(_share, dim=0, rank=rank // copies, size=shares)
                yield [own, *(Part((part,), shared) for part in rest)]
        if not rest and tensor.dim() > 1 and tensor.shape[1] % size == 0:
            yield [Part((first,), partial(_share, dim=1, rank=rank, size=size))]
    yield [Part((part,), _whole) for part in names]


def _of_experts(
    names: Sequence[str], *, has_gate: bool, rank: int, size: int
) -> Iterator[list[Part]]:
    """[experts, …]: this rank's rows (gate and up) or columns (down) of every expert.

    Some kernels put up before gate, and some transpose every matrix.
    """
    step = 2 if has_gate else 1
    experts = [tuple(names[begin : begin + step]) for begin in range(0, len(names), step)]
    take = partial(_share, dim=0 if has_gate else 1, rank=rank, size=size)
    orders = (1, -1)
    for order in orders:
        in_order = chain.from_iterable(expert[::order] for expert in experts)
        yield [Part((name,), take) for name in in_order]
    for order in orders:
        yield [Part(expert[::order], partial(_transposed, take=take)) for expert in experts]


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
