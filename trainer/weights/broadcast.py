"""Sends weights straight from the trainer into the running engines, and writes files for the other
nodes. The nodes' part is `services.rollout.weights.receive`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from common.errors import ConfigError, Conflict
from common.process.progress import Progress
from common.wire.schemas import WeightChecksums, WeightManifest, WeightVerdict, WorkerReport
from trainer.weights.board import WeightBoard
from trainer.weights.comparison import Checksums, Comparison
from trainer.weights.host_copy import BUCKET_BYTES, HostCopy
from trainer.weights.transfer import EngineGroup, Rendezvous, Transfer
from trainer.weights.versions import Weights, write_version

log = logging.getLogger(__name__)
_BLAME_S = 3.0
"""How long to wait, after a failed broadcast, for the report that names the engine at fault."""


class Broadcaster:
    """Announces a version, sends it to the engines that are ready, and writes files for the others.

    `limit_s` applies to the rendezvous and to every bucket of the transfer.
    """

    def __init__(
        self,
        board: WeightBoard,
        static_files: list[Path],
        run_id: str,
        limit_s: float,
        rendezvous: Rendezvous,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._board = board
        self._static_files = static_files
        self._run_id = run_id
        self._limit_s = limit_s
        self._rendezvous = rendezvous
        self._copy = HostCopy(bucket_bytes)
        self._group: EngineGroup | None = None
        self._checksums = Checksums(rendezvous.gpu_checksums, rendezvous.sharding)
        board.source = self

    def publish(self, weights: Weights, version: int) -> tuple[WeightManifest, int]:
        """Announces and sends a version; returns its newest manifest and its bytes. Does not wait
        for confirmation. Raises ConfigError as `refuse_other_nccl`.
        """
        self.refuse_other_nccl()
        copy = self._copy
        # A node that requests the files right after the announcement waits for the copy.
        with copy.lock:
            # The announcement lists the buckets, which the first copy makes. Later copies fill the
            # same ones, so that a bucket is sent as soon as it is full.
            is_first = not copy.buckets
            if is_first:
                copy.fill(weights, version)
            # Others get files: an engine that starts or fails cannot join a group.
            ready = [worker for worker in self._board.workers() if worker.state == "ready"]
            group = self._group_of(ready)
            broadcast = group.announcement(copy.buckets) if group else None
            manifest = WeightManifest(version=version, run_id=self._run_id, broadcast=broadcast)
            self._board.announce(manifest)

            transfer = Transfer(group, copy.flats) if group else None
            if not is_first:
                copy.fill(weights, version, transfer.put if transfer else lambda _: None)
            elif transfer:
                for index in range(len(copy.flats)):
                    transfer.put(index)
            if transfer:
                transfer.finish()
            # Computed while engines still receive: one that is faster waits for it in `verify`.
            self._checksums.prepare(copy.tensors())

        if group and transfer:
            problem = self._problem(group, transfer)
            if problem:
                log.error(
                    "weights %d were not broadcast, so they go over HTTP: %s", version, problem
                )
                group.close(stuck=not transfer.done.done())
                manifest = self._board.withdraw()
        return manifest, copy.size

    def refuse_other_nccl(self) -> None:
        """Raises ConfigError for an engine whose NCCL is of another version: no group could be
        formed, and every version would go over HTTP.
        """
        own = self._rendezvous.nccl
        others = [
            f"{worker.name} has {worker.libraries.nccl} (torch {worker.libraries.torch})"
            for worker in self._board.workers()
            if own and worker.libraries and worker.libraries.nccl != own
        ]
        if others:
            raise ConfigError(
                f"the trainer has NCCL {own}, but {', '.join(others)}; NCCL refuses a group of "
                "several versions",
                field="trainer.weight_sync",
                value="distributed",
                remedy="start both tasks in one image (image_id, docs/how-to/clusters.md#images), "
                "or set it to http or shared",
            )

    def close_if_broken(self) -> None:
        """Closes the group if an engine has fallen out of it, so that the next version forms a new
        one.
        """
        group = self._group
        if group is None or group.closed:
            return
        problem = self._lost(group)
        if problem:
            log.error("the trainer and the engines will form a new group: %s", problem)
            group.close()

    def close(self) -> None:
        """Closes the group: connections that are open when the interpreter ends could abort it."""
        if self._group is not None and not self._group.closed:
            self._group.close()

    def _group_of(self, members: list[WorkerReport]) -> EngineGroup | None:
        if self._group is not None and not self._group.fits(members):
            if not self._group.closed:
                self._group.close()
            self._group = None
        if self._group is None and members:
            try:
                self._group = EngineGroup(members, self._rendezvous, self._limit_s)
            except RuntimeError as error:
                log.error(
                    "no group can be formed at %s, so weights go over HTTP: %s",
                    self._rendezvous.address,
                    error,
                )
                return None
            names = [
                f"{worker.name} ({worker.tensor_parallel_size})" for worker in self._group.members
            ]
            log.info(
                "group %s of the trainer and the engines of %s", self._group.name, ", ".join(names)
            )
        return self._group

    def _problem(self, group: EngineGroup, transfer: Transfer) -> str | None:
        """Waits for the end of the transfer; returns why it failed, naming the workers, or None."""
        waits = Progress("the broadcast", self._limit_s, unit="buckets sent")
        while not wait([transfer.done], min(0.05, waits.pause_s)).done:
            lost = self._lost(group)
            if lost:
                return lost
            waits.saw(transfer.sent)
            if waits.is_stuck:
                return f"no progress: {waits}; {self._states(group)}"
        error = transfer.done.exception()
        if error is None:
            return None

        limit = time.monotonic() + _BLAME_S
        lost = self._lost(group)
        while lost is None and time.monotonic() < limit:
            time.sleep(0.05)
            lost = self._lost(group)
        return f"{lost or self._states(group)} ({type(error).__name__}: {error})"

    def _lost(self, group: EngineGroup) -> str | None:
        """Names the members that are gone, failed or restarted since the group was formed; None
        when all are there.
        """
        now = {worker.name: worker for worker in self._board.workers()}
        lost = []
        for member in group.members:
            report = now.get(member.name)
            if report is None:
                lost.append(f"{member.name} stopped reporting")
            elif report.incarnation != member.incarnation or report.state in ("failed", "starting"):
                detail = report.detail or "its engine was started again"
                lost.append(f"{report.name} is {report.state}: {detail}")
        return "; ".join(lost) or None

    def _states(self, group: EngineGroup) -> str:
        names = {member.name for member in group.members}
        states = [
            f"{worker.name} is {worker.state} {worker.detail}".strip()
            for worker in self._board.workers()
            if worker.name in names
        ]
        return ", ".join(states)

    def write(self, version: int, wrote: Callable[[], None]) -> WeightManifest:
        """See `VersionSource`."""
        with self._copy.reading(version) as tensors:
            return write_version(
                tensors.items(),
                self._static_files,
                self._board.directory,
                run_id=self._run_id,
                version=version,
                wrote=wrote,
            )

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Compares the weights that an engine has received with those that were sent.

        Raises Conflict when they differ, and NotFound when there is a newer version.
        """
        comparison = await asyncio.to_thread(self._compare, version, sums)
        problem = comparison.problem
        if problem:
            raise Conflict(
                f"{sums.worker}: {problem}",
                field="checksums",
                value=f"{comparison.compared} of {comparison.total} compared",
            )
        return WeightVerdict(compared=str(comparison))

    def _compare(self, version: int, sums: WeightChecksums) -> Comparison:
        with self._copy.reading(version) as tensors:
            return self._checksums.compare(tensors, sums.ranks)
