"""The trainer's end of a process group with the engines, and the transfer of one version through
it. The engines' end is `services.engine.distributed`, or SGLang's own; their agents have them join
(`services.rollout.weights.receive`).
"""

import logging
import os
import queue
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from common.process.daemon_threads import in_daemon_thread
from common.wire.schemas import Broadcast, Bucket, WorkerReport
from learning.staging import Staging
from learning.weight_group import group_device, join
from trainer.weights.layouts import TENSOR_PARALLEL, Sharding

log = logging.getLogger(__name__)
BackendName = Literal["gloo", "nccl"]
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_OF_OTHER_GROUPS = os.environ.get(_NCCL_ERRORS)
"""Read once: a join that was given up may still wait while the next one begins."""


@dataclass(frozen=True)
class Rendezvous:
    """The address at which engines find the trainer, and the backend that carries the tensors.

    `gpu_checksums`: SGLang runs on GPUs, where it computes its checksums with another function than
    on CPUs. `sharding` is that of the engines. `nccl` is the version here, empty with gloo.
    """

    address: str
    backend: BackendName = "gloo"
    gpu_checksums: bool = False
    sharding: Sharding = TENSOR_PARALLEL
    nccl: str = ""


class EngineGroup:
    """A process group of the trainer (rank 0) and all ranks of the engines of `members`.

    The group has its own rendezvous store: closing it ends the wait of engines that have not joined
    yet.
    """

    def __init__(
        self, members: Sequence[WorkerReport], rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        self.name = f"weights-{secrets.token_hex(4)}"
        self.members = sorted(members, key=lambda worker: worker.name)
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s
        self.world_size = 1 + sum(worker.tensor_parallel_size for worker in members)
        self._process_group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = dist.TCPStore(
            rendezvous.address,
            0,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        self._staging: Staging | None = None
        self.port = self._store.port
        self.closed = False

    def fits(self, members: Sequence[WorkerReport]) -> bool:
        """Whether the group consists of exactly these engines, none of them restarted since."""
        return not self.closed and _incarnations(members) == _incarnations(self.members)

    def announcement(self, buckets: list[Bucket]) -> Broadcast:
        """Returns the message that tells the agents how to join and which buckets they will
        receive.
        """
        ranks: dict[str, int] = {}
        next_rank = 1
        for worker in self.members:
            ranks[worker.name] = next_rank
            next_rank += worker.tensor_parallel_size
        return Broadcast(
            group=self.name,
            master_address=self.rendezvous.address,
            master_port=self.port,
            world_size=self.world_size,
            backend=self.rendezvous.backend,
            ranks=ranks,
            incarnations=_incarnations(self.members),
            buckets=buckets,
        )

    def send(self, flat: Tensor) -> None:
        """Broadcasts uint8 [bytes] in host memory; joins first. May return before the bytes have
        arrived: see `wait`.

        Raises RuntimeError when that fails or takes too long.
        """
        if self._process_group is None:
            with _no_watchdog():
                self._process_group = join(
                    self.rendezvous.address,
                    self.port,
                    rank=0,
                    world_size=self.world_size,
                    name=self.name,
                    backend=self.rendezvous.backend,
                    timeout_s=self.timeout_s,
                )
        if self._staging is None:  # one for all buckets: GPU memory is cached per stream
            self._staging = Staging(group_device(self.rendezvous.backend))
        there = self._staging.to_device(flat)
        # Its memory may be freed at once: whatever takes it over is put on the same stream.
        self._staging.on_stream(lambda: dist.broadcast(there, src=0, group=self._process_group))

    def wait(self) -> None:
        """Waits until all bytes have arrived."""
        if self._staging is not None:
            self._staging.synchronize()

    def close(self, stuck: bool = False) -> None:
        """Ends the rendezvous and the connections; `stuck`: aborts a broadcast in progress."""
        self.closed = True
        self._store = None
        group = self._process_group
        if group is None:
            return
        if not stuck:  # no thread is inside a broadcast, which would crash without its group
            self._process_group = None
            dist.destroy_process_group(group)
        elif self.rendezvous.backend == "nccl":
            # A broadcast by gloo ends by its own time limit; the transfer's thread then closes the
            # group.
            group.abort()


def _incarnations(workers: Sequence[WorkerReport]) -> dict[str, str]:
    """Returns the incarnation of each engine, new with each start, by its worker's name."""
    return {worker.name: worker.incarnation for worker in workers}


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """NCCL errors of a group created inside are raised in the calling code; by default they end the
    process.
    """
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_NCCL_ERRORS, None)
        if _OF_OTHER_GROUPS is not None:
            os.environ[_NCCL_ERRORS] = _OF_OTHER_GROUPS


class Transfer:
    """Sends buckets through a group, in the order of `put`, in a daemon thread that the group's
    limit for one bucket ends. `flats` are the bytes of the buckets.
    """

    def __init__(self, group: EngineGroup, flats: Sequence[Tensor]) -> None:
        self._group = group
        self._flats = flats
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.sent = 0
        """Buckets that were sent."""
        self.done = in_daemon_thread(self._run, "broadcast")
        """Fails with the error that ended the transfer."""

    def put(self, index: int) -> None:
        """Queues the complete bucket at `index`."""
        self._queue.put(index)

    def finish(self) -> None:
        """Ends the transfer after the queued buckets."""
        self._queue.put(None)

    def _run(self) -> None:
        try:
            for index in iter(self._queue.get, None):
                self._group.send(self._flats[index])
                self.sent += 1
            self._group.wait()
        finally:
            if self._group.closed:
                self._group.close()
