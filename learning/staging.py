"""Copies tensors of any size between a device and host memory through two pinned buffers, on one
stream.

A copy to pageable memory blocks the calling thread, and pinned memory for a whole model would be
lost to the host for good. On a CPU the same code runs without streams.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

_BUFFER_BYTES = 64 << 20


class Staging:
    """Copies tensors of `device` in order, while the caller continues. Not thread-safe."""

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self.device = device
        self._size = buffer_bytes
        self._streams: Any = torch.get_device_module(device)
        # The stream of all copies.
        self._stream: Any = self._streams.Stream()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._work: list[Future[Any]] = []
        # The pinned buffers, each with a function that waits until it may be overwritten; the next
        # one first.
        self._buffers: deque[tuple[Tensor, Callable[[], Any]]] = deque()

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns a copy in host memory (`out` if given), which is complete after `wait`.

        `tensor` must not change until then.
        """
        if out is None:
            out = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._stream.wait_stream(self._streams.current_stream())  # it produces the tensor
        # Two buffers alternate: the device fills one while a thread empties the other.
        pieces = self._pieces(tensor.detach().contiguous())
        for piece, place in zip(pieces, self._pieces(out), strict=True):
            buffer = self._free()
            copied = self._copy(buffer[: len(piece)], piece)
            landed = self.then(partial(_land, piece, copied, buffer=buffer, place=place))
            self._buffers.append((buffer, landed.result))
        return out

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the device, for use in `on_stream`."""
        with self._streams.stream(self._stream):
            there = torch.empty_like(tensor, device=self.device)
        for piece, place in zip(self._pieces(tensor), self._pieces(there), strict=True):
            buffer = self._free()
            buffer[: len(piece)].copy_(piece)
            copied = self._copy(place, buffer[: len(piece)])
            self._buffers.append((buffer, copied.synchronize))
        return there

    def on_stream(self, work: Callable[[], Any]) -> None:
        """Runs `work` on the device after the copies to it, and before those that follow. Does not
        wait for it.
        """
        with self._streams.stream(self._stream):
            work()

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        self._mark().synchronize()

    def then(self, work: Callable[[], Any]) -> "Future[Any]":
        """Calls `work` in another thread after all copies so far, unless one of them failed."""
        before = self._work[-1].result if self._work else _nothing
        self._work.append(self._thread.submit(lambda: (before(), work())))
        return self._work[-1]

    def wait(self) -> None:
        """Waits for all copies and work. Raises the first error."""
        work = self._work
        self._work = []
        for future in work:
            future.result()

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Splits the bytes of a contiguous tensor."""
        flat: Tensor = tensor.reshape(-1).view(torch.uint8)
        return flat.split(self._size) if flat.numel() else ()

    def _copy(self, to: Tensor, source: Tensor) -> Any:
        """Copies on the stream; returns the event of the copy's end."""
        with self._streams.stream(self._stream):
            to.copy_(source, non_blocking=True)
        return self._mark()

    def _mark(self) -> Any:
        """Returns an event for the end of the work queued on the stream."""
        event = self._streams.Event()
        event.record(self._stream)
        return event

    def _free(self) -> Tensor:
        """Returns the next buffer, after waiting for its last use to end."""
        if not self._buffers:
            pinned = self.device.type == "cuda"
            for _ in range(2):
                new = torch.empty(self._size, dtype=torch.uint8, pin_memory=pinned)
                self._buffers.append((new, _nothing))
        buffer, wait = self._buffers.popleft()
        wait()
        return buffer


def on_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns tensors by name, contiguous and in host memory; tensors already there are not
    copied.
    """
    copies: dict[torch.device, Staging] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        if tensor.device.type == "cpu":
            found[name] = tensor.detach().contiguous()
            continue
        if tensor.device not in copies:
            copies[tensor.device] = Staging(tensor.device)
        found[name] = copies[tensor.device].to_host(tensor)
    for staging in copies.values():
        staging.wait()
    return found


def _land(_source: Tensor, copied: Any, buffer: Tensor, place: Tensor) -> None:
    """Copies from a buffer once the copy into it is done; holds a reference to the source until
    then.
    """
    copied.synchronize()
    place.copy_(buffer[: len(place)])


def _nothing() -> None: ...
