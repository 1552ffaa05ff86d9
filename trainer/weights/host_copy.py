"""A copy of the published weights in the host's memory: the source of broadcasts, of files on demand and of checksums."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from common.errors import NotFound, ServiceError
from common.schemas import Bucket
from learning.weight_group import digest, size_of, views
from trainer.weights.publisher import Weights

BUCKET_BYTES = 512 << 20
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that SGLang fuses along dimension 0."""
_VOCABULARY, _VOCABULARY_ROWS = ("embed_tokens.weight", "lm_head.weight"), 64
"""SGLang pads these with rows of zeros to a multiple of so many."""


class HostCopy:
    """The tensors of one version, in contiguous buckets, each sent as one message; a tensor over `bucket_bytes` has its own.

    It costs the published weights once in host memory, with `pinned` in pages that a GPU can copy from directly. `fill` and
    `reading` exclude each other.
    """

    def __init__(self, pinned: bool = False, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buckets: list[Bucket] = []
        self.flats: list[Tensor] = []
        """The bytes of every bucket, uint8 [bytes]."""
        self.lock = threading.RLock()
        self._pinned, self._most = pinned, bucket_bytes
        self._version: int | None = None
        self._digests: dict[str, list[str]] = {}
        self._names: set[str] = set()

    @property
    def size(self) -> int:
        """All buckets together, in bytes."""
        return sum(flat.numel() for flat in self.flats)

    def fill(self, weights: Weights, version: int, ready: Callable[[int], None] = lambda _: None) -> None:
        """Copies `weights` in; `ready` is called with the index of each bucket as soon as it is complete.

        Raises ServiceError when names, shapes or dtypes are not those of the first call.
        """
        with self.lock:
            self._version, self._digests = None, {}
            if self.buckets:
                self._refill(iter(weights), ready)
            else:
                self._build(weights)
                for index in range(len(self.flats)):
                    ready(index)
            self._version = version

    def _build(self, weights: Weights) -> None:
        held: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            if held and (size + tensor.nbytes > self._most or tensor.dtype != held[0][1].dtype):
                self._close(held)
                held, size = [], 0
            held.append((name, tensor.detach().cpu()))
            size += tensor.nbytes
        if held:
            self._close(held)

    def _close(self, held: list[tuple[str, Tensor]]) -> None:
        bucket = Bucket(
            names=[name for name, _ in held],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
            shapes=[list(tensor.shape) for _, tensor in held],
        )
        flat = torch.empty(size_of(bucket), dtype=torch.uint8, pin_memory=self._pinned)
        for (_, view), (_, tensor) in zip(views(flat, bucket), held, strict=True):
            view.copy_(tensor)
        self.buckets.append(bucket)
        self.flats.append(flat)

    def _refill(self, weights: Iterator[tuple[str, Tensor]], ready: Callable[[int], None]) -> None:
        for index, (bucket, flat) in enumerate(zip(self.buckets, self.flats, strict=True)):
            for name, view in views(flat, bucket):
                found, tensor = next(weights, ("nothing", view))
                if (found, tensor.shape, tensor.dtype) != (name, view.shape, view.dtype):
                    raise ServiceError("the layout of the weights to publish has changed", field=name, value=found)
                view.copy_(tensor)
            ready(index)
        if more := next(weights, None):
            raise ServiceError("there are more weights to publish than before", field="name", value=more[0])

    @contextmanager
    def reading(self, version: int) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of this version, and keeps `fill` waiting. Raises NotFound when the version is gone."""
        with self.lock:
            if version != self._version:
                raise NotFound("these weights are gone", field="version", value=version, remedy="ask for the newest")
            yield {
                name: view for bucket, flat in zip(self.buckets, self.flats, strict=True) for name, view in views(flat, bucket)
            }

    def differing(self, version: int, checksums: dict[str, str]) -> tuple[list[str], int, int]:
        """Returns an engine's names with a wrong checksum, the number of tensors compared, and that of all tensors.

        A name that is neither a tensor's nor a fused parameter's is not compared. Raises NotFound as `reading` does.
        """
        with self.reading(version) as tensors:
            wrong, compared = [], 0
            self._names.update(checksums)
            for name, checksum in checksums.items():
                if known := self._digests_of(name, tensors):
                    compared += len(_parts(name))
                    if checksum not in known:
                        wrong.append(name)
            return wrong, compared, len(tensors)

    def prepare(self, version: int) -> None:
        """Computes the checksums that `differing` needed the last time, while engines still receive this version."""
        with self.reading(version) as tensors:
            for name in self._names:
                self._digests_of(name, tensors)

    def _digests_of(self, name: str, tensors: dict[str, Tensor]) -> list[str]:
        """The checksums that an engine may report for its parameter `name`; none when the name is unknown."""
        if name not in self._digests:
            found = self._digests[name] = []
            if all(part in tensors for part in _parts(name)):
                parts = [tensors[part] for part in _parts(name)]
                found.append(digest(*parts))
                if name.endswith(_VOCABULARY) and (rows := -len(parts[0]) % _VOCABULARY_ROWS):
                    found.append(digest(*parts, parts[0].new_zeros(rows, *parts[0].shape[1:])))
        return self._digests[name]


def _parts(name: str) -> list[str]:
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]
