"""A copy of the published weights in host memory: the source of broadcasts, of files on demand and
of checksums.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from common.errors import NotFound, ServiceError
from common.wire.schemas import Bucket
from learning.staging import Staging
from learning.weight_group import size_of, views
from trainer.weights.versions import Weights

BUCKET_BYTES = 512 << 20


class HostCopy:
    """The tensors of one version, in contiguous buckets, each sent as one message; a tensor over
    `bucket_bytes` has its own.

    It takes as much host memory as the published weights. `fill` and `reading` exclude each other.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buckets: list[Bucket] = []
        self.flats: list[Tensor] = []
        """The bytes of every bucket, uint8 [bytes]."""
        self.lock = threading.RLock()
        self._bucket_bytes = bucket_bytes
        self._staging: Staging | None = None
        self._version: int | None = None

    @property
    def size(self) -> int:
        """The total size of the buckets in bytes."""
        return sum(flat.numel() for flat in self.flats)

    def fill(
        self, weights: Weights, version: int, ready: Callable[[int], None] = lambda _: None
    ) -> None:
        """Copies `weights` in; `ready` is called in another thread with the index of each bucket as
        soon as it is complete.

        Raises ServiceError when names, shapes or dtypes are not those of the first call.
        """
        with self.lock:
            self._version = None
            try:
                if self.buckets:
                    self._refill(iter(weights), ready)
                else:
                    self._build(weights)
                    for index in range(len(self.flats)):
                        ready(index)
            finally:
                if self._staging:
                    self._staging.wait()
            self._version = version

    def _staging_for(self, tensor: Tensor) -> Staging:
        """Returns the `Staging` for the device of this tensor."""
        if self._staging is None or self._staging.device != tensor.device:
            self._staging = Staging(tensor.device)
        return self._staging

    def _build(self, weights: Weights) -> None:
        held: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            # Views of a bucket need its offset to be a multiple of their item size: one dtype each.
            is_full = size + tensor.nbytes > self._bucket_bytes
            if held and (is_full or tensor.dtype != held[0][1].dtype):
                self._close(held)
                held = []
                size = 0
            held.append((name, self._staging_for(tensor).to_host(tensor)))
            size += tensor.nbytes
        if held:
            self._close(held)

    def _close(self, held: list[tuple[str, Tensor]]) -> None:
        if self._staging:
            self._staging.wait()
        bucket = Bucket(
            names=[name for name, _ in held],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
            shapes=[list(tensor.shape) for _, tensor in held],
        )
        flat = torch.empty(size_of(bucket), dtype=torch.uint8)
        for (_, view), (_, tensor) in zip(views(flat, bucket), held, strict=True):
            view.copy_(tensor)
        self.buckets.append(bucket)
        self.flats.append(flat)

    def _refill(self, weights: Iterator[tuple[str, Tensor]], ready: Callable[[int], None]) -> None:
        for index, (bucket, flat) in enumerate(zip(self.buckets, self.flats, strict=True)):
            for name, view in views(flat, bucket):
                found, tensor = next(weights, ("nothing", view))
                if (found, tensor.shape, tensor.dtype) != (name, view.shape, view.dtype):
                    raise ServiceError(
                        "the layout of the published weights has changed", field=name, value=found
                    )
                staging = self._staging_for(tensor)
                staging.to_host(tensor, view)
            staging.then(partial(ready, index))
        surplus = next(weights, None)
        if surplus is not None:
            raise ServiceError(
                "there are more weights to publish than before", field="name", value=surplus[0]
            )

    @contextmanager
    def reading(self, version: int) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of this version, and keeps `fill` waiting. Raises NotFound when the
        version is gone.
        """
        with self.lock:
            if version != self._version:
                raise NotFound(
                    "this version of the weights was removed",
                    field="version",
                    value=version,
                    remedy="ask for the newest version",
                )
            yield self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Returns views of the tensors, whichever version they are of; `reading` says which."""
        tensors: dict[str, Tensor] = {}
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            tensors.update(views(flat, bucket))
        return tensors
