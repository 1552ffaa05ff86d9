"""The layouts in which an engine may hold its parameters, in terms of the tensors that were sent to
it.

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

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the part of the parameter that these tensors make."""
        return self.take(*(tensors[name] for name in self.names))

    def converted(self, dtype: torch.dtype) -> "Part":
        """Returns the part in another precision."""
        return Part(self.names, lambda *tensors: self.take(*tensors).to(dtype))


TENSOR_PARALLEL = Sharding()
ParameterLayout = Sequence[Part]
"""A layout in which an engine may hold a parameter."""


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
    if last in _EXPERTS and name not in tensors:
        has_gate = last == "w13_weight"
        own = _own_experts(
            names, step=2 if has_gate else 1, rank=rank, size=size, groups=sharding.expert_groups
        )
        group = size // sharding.expert_groups
        sharded = partial(_of_experts, own, has_gate=has_gate, rank=rank % group, size=group)
    else:
        sharded = partial(_of_groups, name, names, tensors, rank=rank, size=size, sharding=sharding)
    yield from sharded()

    sent_dtype = tensors[names[0]].dtype
    if sent_dtype.is_floating_point:
        for dtype in _DTYPES:
            if dtype != sent_dtype:
                for layout in sharded():
                    yield [part.converted(dtype) for part in layout]


def _own_experts(
    names: Sequence[str], *, step: int, rank: int, size: int, groups: int
) -> Sequence[str]:
    """Returns the names of the experts of the rank's group, `step` for each expert; consecutive
    ranks form a group.
    """
    group = rank // (size // groups)
    experts = len(names) // step // groups
    return names[group * experts * step : (group + 1) * experts * step]


def _of_groups(
    name: str,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    size: int,
    sharding: Sharding,
) -> Iterator[ParameterLayout]:
    """Yields the layouts of a parameter that all ranks share, and that the ranks of an attention
    group do.
    """
    group = size // sharding.attention_groups
    for shares in sorted({size, group}, reverse=True):
        yield from _of_parameter(name, names, tensors, rank=rank % shares, size=shares)


def _of_parameter(
    name: str, names: Sequence[str], tensors: Mapping[str, Tensor], *, rank: int, size: int
) -> Iterator[ParameterLayout]:
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


def _of_experts(
    names: Sequence[str], *, has_gate: bool, rank: int, size: int
) -> Iterator[ParameterLayout]:
    """[experts, …]: this rank's rows (gate and up) or columns (down) of every expert.

    Some kernels put up before gate, and some transpose every matrix.
    """
    step = 2 if has_gate else 1
    experts = [tuple(names[begin : begin + step]) for begin in range(0, len(names), step)]
    take = partial(_share, dim=0 if has_gate else 1, rank=rank, size=size)
    orders = (1, -1) if has_gate else (1,)
    for order in orders:
        in_order = chain.from_iterable(expert[::order] for expert in experts)
        yield [Part((name_of_part,), take) for name_of_part in in_order]
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
