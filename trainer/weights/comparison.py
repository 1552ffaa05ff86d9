"""Compares the checksums that engines report for their weights with the tensors that were sent to them.

The embedded engine uses the names in the files. SGLang reports checksums of its own parameters: it stacks projections
(`qkv_proj`) and experts (`w13_weight`), pads the vocabulary, and shards parameters across GPUs. This module rebuilds
each of them from the tensors that were sent, in the layouts that SGLang uses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from learning.weight_group import digest

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that SGLang fuses along dimension 0."""
_EXPERTS = {"w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")), "w2_weight": (("down_proj",), ("w2",))}
"""Parameters that hold all experts, and the names of each expert's parts in model files."""
_RENAMED = {".self_attn.proj.": ".self_attn.out_proj."}
"""SGLang's names for modules of vision towers, and their names in model files."""
_VOCABULARY, _VOCABULARY_ROWS = ("embed_tokens.weight", "lm_head.weight", "position_embedding.weight"), 64
"""SGLang pads these with rows of zeros to a multiple of this number of rows."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
"""An engine converts the tensors to its own precision."""
_Make = Callable[[], Tensor]


@dataclass(frozen=True)
class Comparison:
    """The tensors that were sent, compared with the parameters of an engine."""

    wrong: list[str]
    """The engine's parameters whose checksum differs from that of the tensors they are built from."""
    unseen: list[str]
    """Tensors that belong to no known parameter of the engine."""
    unknown: list[str]
    """Parameters of the engine that match none of these tensors by name."""
    compared: int
    total: int

    @property
    def problem(self) -> str | None:
        """Why the engine does not have what was sent, or None. With unknown parameters, tensors may be unseen."""
        if self.wrong:
            return f"{len(self.wrong)} parameters of the engine differ from what was sent: {self.wrong[0]}"
        if not self.compared:
            return "no parameter of the engine has a name that was sent"
        if self.unseen and not self.unknown:
            return f"{len(self.unseen)} tensors did not reach the engine: {self.unseen[0]}"
        return None

    def __str__(self) -> str:
        unseen = f"; the engine has {self.unseen[0]} and {len(self.unseen) - 1} more by other names" if self.unseen else ""
        return f"{self.compared} of {self.total} tensors with the trainer's{unseen}"


class Checksums:
    """The checksums of one version, each computed once; with `on_gpu` by the function that SGLang uses on GPUs."""

    def __init__(self, on_gpu: bool) -> None:
        self._digest: Callable[[Tensor], str] = gpu_digest if on_gpu else digest
        self._known: dict[tuple[str, int, int, int], str] = {}
        self._usual: dict[tuple[str, int, int], int] = {}

    def clear(self) -> None:
        """Forgets the checksums, for the next version, but not the layouts that engines use."""
        self._known.clear()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Computes the checksums in the layouts that matched the last time."""
        for (name, rank, size), way in self._usual.items():
            self._sum(name, rank, size, way, ways(name, tensors, rank, size))

    def compare(self, tensors: Mapping[str, Tensor], ranks: Sequence[Mapping[str, str]]) -> Comparison:
        """Compares `tensors` with the checksums by parameter that each rank of an engine reports."""
        wrong: list[str] = []
        unknown: list[str] = []
        seen: set[str] = set()
        for rank, sums in enumerate(ranks):
            for name, checksum in sums.items():
                if parts := parts_of(name, tensors):
                    seen.update(parts)
                    if not self._right(name, rank, len(ranks), checksum, ways(name, tensors, rank, len(ranks))):
                        wrong.append(name)
                else:
                    unknown.append(name)
        return Comparison(wrong, [name for name in tensors if name not in seen], unknown, len(seen), len(tensors))

    def _right(self, name: str, rank: int, size: int, checksum: str, made: Sequence[_Make]) -> bool:
        usual = self._usual.get((name, rank, size), 0)
        for way in (usual, *(way for way in range(len(made)) if way != usual)):
            if self._sum(name, rank, size, way, made) == checksum:
                self._usual[name, rank, size] = way
                return True
        return False

    def _sum(self, name: str, rank: int, size: int, way: int, made: Sequence[_Make]) -> str:
        key = (name, rank, size, way)
        if key not in self._known:
            self._known[key] = self._digest(made[way]())
        return self._known[key]


def parts_of(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that make up an engine's parameter, in order; [] for an unknown one."""
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


def _of_every_expert(prefix: str, parts: Sequence[str], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for expert in count():
        names = [f"{prefix}.{expert}.{part}.weight" for part in parts]
        if not all(name in tensors for name in names):
            return
        yield from names


def ways(name: str, tensors: Mapping[str, Tensor], rank: int, size: int) -> list[_Make]:
    """Returns functions that build a parameter in each layout rank `rank` of `size` may use, likeliest first."""
    parts = [tensors[part] for part in parts_of(name, tensors)]
    last = name.rpartition(".")[2]
    if last in _EXPERTS and name not in tensors:
        found = _ways_of_experts(parts, 2 if last == "w13_weight" else 1, rank, size)
    else:
        found = list(_ways(name, parts, rank, size))
    given = parts[0].dtype
    others = [dtype for dtype in _DTYPES if dtype != given] if given.is_floating_point else []
    return found + [partial(_converted, make, dtype) for dtype in others for make in found]


def _converted(make: _Make, dtype: torch.dtype) -> Tensor:
    return make().to(dtype)


def _ways(name: str, parts: Sequence[Tensor], rank: int, size: int) -> Iterator[_Make]:
    whole = partial(_joined, parts)
    if name.endswith(_VOCABULARY):
        yield partial(_part, partial(_padded, parts[0], size), 0, rank, size)
    elif size > 1:
        for copies in (copies for copies in range(1, size + 1) if size % copies == 0):  # GPUs may share key-value heads
            if all(len(part) % (size if i == 0 else size // copies) == 0 for i, part in enumerate(parts)):
                yield partial(_rows, parts, rank, size, copies)
        if len(parts) == 1 and parts[0].dim() > 1 and parts[0].shape[1] % size == 0:
            yield partial(_part, whole, 1, rank, size)
    yield whole


def _ways_of_experts(parts: Sequence[Tensor], each: int, rank: int, size: int) -> list[_Make]:
    """[experts, …]: this rank's rows (gate and up) or columns (down) of every expert.

    Some kernels put up before gate, and some transpose every matrix.
    """
    experts = [parts[i : i + each] for i in range(0, len(parts), each)]
    dim = 0 if each == 2 else 1
    orders = (1, -1) if each == 2 else (1,)
    plain = [partial(_stacked, experts, dim, rank, size, order) for order in orders]
    return [*plain, *(partial(_transposed, make) for make in plain)]


def _stacked(experts: Sequence[Sequence[Tensor]], dim: int, rank: int, size: int, order: int) -> Tensor:
    return torch.stack([torch.cat([part.chunk(size, dim)[rank] for part in expert[::order]]) for expert in experts])


def _transposed(make: _Make) -> Tensor:
    return make().transpose(1, 2)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _rows(parts: Sequence[Tensor], rank: int, size: int, copies: int) -> Tensor:
    first, *rest = parts
    return torch.cat([first.chunk(size)[rank], *(part.chunk(size // copies)[rank // copies] for part in rest)])


def _part(make: _Make, dim: int, rank: int, size: int) -> Tensor:
    return make().chunk(size, dim)[rank]


def _padded(tensor: Tensor, size: int) -> Tensor:
    multiple = _VOCABULARY_ROWS
    if (len(tensor) + -len(tensor) % multiple) % size:  # the rows do not divide evenly among the GPUs
        multiple *= size
    rows = -len(tensor) % multiple
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])]) if rows else tensor


_MASK = 0xFFFFFFFF
_TILE, _TILES = 8192, 1024
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_SEED = 0x243F6A88
_LANES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK, 13))
"""Factor, seed and rotation by which the position of a word enters each half of the checksum."""


def gpu_digest(tensor: Tensor) -> str:
    """Returns the checksum that SGLang's `/weights_checker` reports for a tensor on a GPU, as 16 hex digits.

    Every 32-bit word is mixed with its position (the finaliser of MurmurHash3); the sums over 8,192 words each are mixed again
    and added up. Runs on a GPU if there is one.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.cat([flat, flat.new_zeros(-len(flat) % 4)]).view(torch.int32)
    device, total = "cuda" if torch.cuda.is_available() else "cpu", 0
    for start in range(0, len(words), _TILE * _TILES):
        part = words[start : start + _TILE * _TILES].to(device, torch.int64) & _MASK
        place = torch.arange(start, start + len(part), device=device)
        halves = []
        for factor, seed, turn in _LANES:
            turned = ((place << turn) | (place >> (32 - turn))) & _MASK
            mixed = _mix(part ^ ((place * factor + seed) & _MASK) ^ turned)
            tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE).sum(1) & _MASK
            halves.append(_mix(tiles ^ (4 * len(words) & _MASK)))
        total += int(((halves[0] << 32) | halves[1]).sum())
    return f"{_split_mix(total & ((1 << 64) - 1)):016x}" if len(words) else "0" * 16


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 13)) * _MIX[1]) & _MASK
    return x ^ (x >> 16)


def _split_mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
