"""Compares the checksums that engines report for their weights with the tensors that were sent to
them.

The embedded engine uses the names in the files. SGLang reports checksums of its own parameters,
each of which is rebuilt from the tensors that were sent, in the layouts that SGLang uses
(`layouts.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from learning.weight_group import digest
from trainer.weights.layouts import Describe, Way, parts_of, ways
from trainer.weights.sent_sums import ChecksumPlan, Key, SentSums
from trainer.weights.tensor_hash import gpu_digest


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
    """The checksums of one version, each computed once; with `on_gpu` by the function that SGLang
    uses on GPUs.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._known: dict[Key, str] = {}
        self._usual: dict[tuple[str, int, int], int] = {}
        self._plan: ChecksumPlan | None = ChecksumPlan({}, {})
        """None when the layouts have changed."""
        self._sent = SentSums(self._plan)

    def begin(self, tensors: Mapping[str, Tensor]) -> SentSums:
        """Begins a version with the shapes of `tensors`: forgets the checksums, but not the layouts
        that engines use.

        Returns the checksums to which whoever sends the version adds its tensors, which saves
        computing them later.
        """
        self._known.clear()
        if self._plan is None:
            self._plan = ChecksumPlan(self._expected(tensors), tensors)
        self._sent = SentSums(self._plan)
        return self._sent

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Computes the checksums in the layouts that matched the last time, except for those that
        come with sending.
        """
        for (name, rank, size), way in self._usual.items():
            key = (name, rank, size, way)
            if key not in self._sent:
                self._sum(key, ways(name, tensors, rank, size)[way], tensors)

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
                seen.update(parts)
                if not self._is_right(name, rank, len(ranks), checksum=checksum, tensors=tensors):
                    wrong.append(name)
        return Comparison(
            wrong=wrong,
            unseen=[name for name in tensors if name not in seen],
            unknown=unknown,
            compared=len(seen),
            total=len(tensors),
        )

    def _expected(self, tensors: Mapping[str, Tensor]) -> dict[Key, Way]:
        return {
            (name, rank, size, way): ways(name, tensors, rank, size)[way]()
            for (name, rank, size), way in self._usual.items()
        }

    def _is_right(
        self, name: str, rank: int, size: int, checksum: str, tensors: Mapping[str, Tensor]
    ) -> bool:
        """Whether a checksum is that of the parameter's tensors in one of its layouts; remembers
        which, and tries that first the next time.
        """
        layouts = ways(name, tensors, rank, size)
        usual = self._usual.get((name, rank, size), 0)
        others = [way for way in range(len(layouts)) if way != usual]
        for way in (usual, *others):
            if self._sum((name, rank, size, way), layouts[way], tensors) == checksum:
                if self._on_gpu and self._usual.get((name, rank, size)) != way:
                    self._plan = None
                self._usual[name, rank, size] = way
                return True
        return False

    def _sum(self, key: Key, describe: Describe, tensors: Mapping[str, Tensor]) -> str:
        if key not in self._known:
            checksum = self._sent.hexdigest(key)
            if checksum is None:
                compute = gpu_digest if self._on_gpu else digest
                checksum = compute(*(part.of(tensors) for part in describe()))
            self._known[key] = checksum
        return self._known[key]
