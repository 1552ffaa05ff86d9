"""Compares the checksums that engines report for their weights with the tensors that were sent to
them.

The embedded engine uses the names in the files. SGLang reports checksums of its own parameters,
each of which is rebuilt from the tensors that were sent, in the layouts that SGLang uses
(`layouts.py`). The checksums come from `services.rollout.weights.receive`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from learning.weight_group import digest
from trainer.weights.layouts import TENSOR_PARALLEL, ParameterLayout, Sharding, layouts, parts_of
from trainer.weights.tensor_hash import gpu_digest

Key = tuple[str, int, int]
"""A parameter: its name in the engine, the rank that has it and the number of ranks."""


@dataclass(frozen=True)
class Comparison:
    """The tensors that were sent, compared with the parameters of an engine."""

    wrong: list[str]
    """The engine's parameters whose checksum differs from that of the tensors they are built
    from."""
    unseen: list[str]
    """Tensors that belong to no known parameter of the engine."""
    unknown: list[str]
    """Parameters of the engine that match none of these tensors by name."""
    compared: int
    total: int

    @property
    def problem(self) -> str | None:
        """Why the engine does not have what was sent, or None. With unknown parameters, tensors may
        be unseen.
        """
        if self.wrong:
            return (
                f"{len(self.wrong)} parameters of the engine differ from what was sent: "
                f"{self.wrong[0]}"
            )
        if not self.compared:
            return "no parameter of the engine has a name that was sent"
        if self.unseen and not self.unknown:
            return f"{len(self.unseen)} tensors did not reach the engine: {self.unseen[0]}"
        return None

    def __str__(self) -> str:
        text = f"{self.compared} of {self.total} tensors with the trainer's"
        if self.unseen:
            others = len(self.unseen) - 1
            text += f"; the engine has {self.unseen[0]} and {others} more by other names"
        return text


class Checksums:
    """The checksums of one version in the layouts that the engines use, each computed once.

    With `on_gpu` they are computed by the function that SGLang uses on GPUs. `sharding` is that of
    the engines.
    """

    def __init__(self, on_gpu: bool, sharding: Sharding = TENSOR_PARALLEL) -> None:
        self._digest = gpu_digest if on_gpu else digest
        self._sharding = sharding
        self._known: dict[Key, str] = {}
        """In the layouts that matched."""
        self._layouts: dict[Key, ParameterLayout] = {}
        """The layout of each parameter that matched at its last comparison."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins a version: computes its checksums in the layouts that matched the last one."""
        self._known = {
            key: self._checksum_of(layout, tensors) for key, layout in self._layouts.items()
        }

    def compare(
        self, tensors: Mapping[str, Tensor], ranks: Sequence[Mapping[str, str]]
    ) -> Comparison:
        """Compares `tensors` with the checksums by parameter that each rank of an engine
        reports.
        """
        wrong: list[str] = []
        unknown: list[str] = []
        seen: set[str] = set()
        for rank, sums in enumerate(ranks):
            for name, checksum in sums.items():
                parts = parts_of(name, tensors)
                if not parts:
                    unknown.append(name)
                    continue
                key = (name, rank, len(ranks))
                if self._is_right(key, checksum, tensors):
                    # A rank may hold only some of the experts.
                    seen.update(self._layouts[key].names)
                else:
                    seen.update(parts)
                    wrong.append(name)
        return Comparison(
            wrong=wrong,
            unseen=[name for name in tensors if name not in seen],
            unknown=unknown,
            compared=len(seen),
            total=len(tensors),
        )

    def _is_right(self, key: Key, checksum: str, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a checksum is that of the parameter's tensors in one of its layouts; remembers
        which.
        """
        if self._known.get(key) == checksum:
            return True
        name, rank, size = key
        for layout in layouts(name, tensors, rank, size, sharding=self._sharding):
            if self._checksum_of(layout, tensors) == checksum:
                self._layouts[key] = layout
                self._known[key] = checksum
                return True
        return False

    def _checksum_of(self, layout: ParameterLayout, tensors: Mapping[str, Tensor]) -> str:
        return self._digest(*layout.of(tensors))
