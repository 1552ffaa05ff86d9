"""SGLang's checksums of weights on GPUs, computed while the weights are sent.

A tensor is then on the GPU anyway; later it would have to be copied there again. What an engine's
parameter is made of is known from the version before:

    bucket on the GPU  ──►  each parameter's parts of it  ──►  the parameter's running checksum
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from trainer.weights.layouts import ParameterLayout, Part
from trainer.weights.tensor_hash import TensorHash

Key = tuple[str, int, int]
"""A parameter: its name in the engine, the rank that has it and the number of ranks."""

_JOINED_BYTES = 64 << 20


class ChecksumPlan:
    """Which checksums the tensors of a version add to, in the layouts that engines use, while they
    are sent.

    `tensors` have the names, shapes and precisions of what will be sent. A parameter is left out if
    one of its parts needs several tensors at once, or ends within a word of 32 bits.
    """

    def __init__(
        self, layouts: Mapping[Key, ParameterLayout], tensors: Mapping[str, Tensor]
    ) -> None:
        self.sizes: dict[Key, int] = {}
        """The bytes of each parameter."""
        self.parts: dict[str, list[tuple[Key, int, Part]]] = defaultdict(list)
        """By tensor: the parameters, the first byte in each, and the tensor's part in it."""
        shapes = {name: tensor.to("meta") for name, tensor in tensors.items()}
        for key, layout in layouts.items():
            sizes = [part.of(shapes).nbytes for part in layout]
            needs_several = any(len(part.names) > 1 for part in layout)
            ends_within_word = any(size % 4 for size in sizes[:-1])
            if needs_several or ends_within_word:
                continue
            self.sizes[key] = sum(sizes)
            for part, start in zip(layout, accumulate(sizes, initial=0), strict=False):
                self.parts[part.names[0]].append((key, start, part))


class SentSums:
    """SGLang's checksums on GPUs of one version, computed from its tensors as they are sent."""

    def __init__(self, plan: ChecksumPlan) -> None:
        self._plan = plan
        self._hashes: dict[Key, TensorHash] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._plan.sizes

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that are sent together to their checksums, on their device and the current
        stream.
        """
        found: dict[Key, list[tuple[int, Tensor]]] = defaultdict(list)
        for name, tensor in tensors.items():
            for key, start, part in self._plan.parts.get(name, ()):
                found[key].append((start, part.take(tensor)))
        for key, parts in found.items():
            if key not in self._hashes:
                self._hashes[key] = TensorHash(self._plan.sizes[key], parts[0][1].device)
            for start, joined in _joined(parts):
                self._hashes[key].add(start, joined)

    def hexdigest(self, key: Key) -> str | None:
        """Returns the checksum of a parameter; None unless all its parts were sent."""
        found = self._hashes.get(key)
        return found.hexdigest() if found is not None and found.complete else None


def _joined(parts: list[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Joins parts that follow one another, such as experts, since many small parts would keep a GPU
    waiting.
    """
    parts.sort(key=lambda part: part[0])
    begin = end = parts[0][0]
    held: list[Tensor] = []
    for start, part in parts:
        if start != end or start - begin >= _JOINED_BYTES:
            yield begin, _flat(held)
            begin = start
            held = []
        held.append(part)
        end = start + part.nbytes
    yield begin, _flat(held)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0]
