"""Weights straight from the trainer into the running engines, and files for the nodes that could not take part."""

import asyncio
import logging
import time
from pathlib import Path

from common.errors import Conflict, NotFound
from common.schemas import WeightChecksums, WeightManifest, WeightVerdict, WorkerReport
from learning.weight_group import digest_all
from trainer.weights.host_copy import BUCKET_BYTES, HostCopy
from trainer.weights.publisher import WeightBoard, Weights, write_version
from trainer.weights.transfer import EngineGroup, Rendezvous, Transfer

log = logging.getLogger(__name__)
_BLAME_S = 3.0
"""Wait, after a broadcast broke off, for the report that names the engine at fault."""


class Broadcaster:
    """Announces a version, sends it to the engines that are ready, and writes files for the others.

    `timeout_s` holds for the rendezvous and for sending.
    """

    def __init__(
        self,
        board: WeightBoard,
        static_files: list[Path],
        run_id: str,
        timeout_s: float,
        rendezvous: Rendezvous,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._board, self._static_files, self._run_id = board, static_files, run_id
        self._timeout_s, self._rendezvous = timeout_s, rendezvous
        self._copy = HostCopy(pinned=rendezvous.backend == "nccl", bucket_bytes=bucket_bytes)
        self._group: EngineGroup | None = None
        self._sums: dict[str, str] = {}
        """The checksum of each engine that has received the newest version."""
        board.broadcaster = self

    def publish(self, weights: Weights, version: int) -> tuple[WeightManifest, int]:
        """Announces and sends; returns what was announced last, and the bytes. Does not wait for confirmation."""
        copy = self._copy
        with copy.lock:  # a node that asks for files of a version as soon as it is announced waits until it is there
            if first := not copy.buckets:
                copy.fill(weights, version)
            group, self._sums = self._group_of([w for w in self._board.workers() if w.state == "ready"]), {}
            broadcast = group.announcement(copy.buckets) if group else None
            manifest = WeightManifest(version=version, run_id=self._run_id, broadcast=broadcast)
            self._board.announce(manifest)
            transfer = Transfer(group, copy.flats) if group else None
            if not first:
                copy.fill(weights, version, transfer.put if transfer else lambda _: None)
            elif transfer:
                for index in range(len(copy.flats)):
                    transfer.put(index)
        if group and transfer:
            transfer.finish()
            copy.prepare(version)
            if problem := self._problem(group, transfer):
                log.error("weights %d were not broadcast and go over HTTP: %s", version, problem)
                group.close(stuck=not transfer.done.is_set())
                manifest = self._board.withdraw(manifest)
        return manifest, copy.size

    def close_if_broken(self) -> None:
        """Closes the group if an engine has fallen out of it, so that the next version forms a new one."""
        group = self._group
        if group is not None and not group.closed and (problem := self._lost(group)):
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
                self._group = EngineGroup(members, self._rendezvous, self._timeout_s)
            except RuntimeError as error:
                log.error("no group can be formed at %s, weights go over HTTP: %s", self._rendezvous.address, error)
                return None
            names = ", ".join(f"{worker.name} ({worker.tensor_parallel_size})" for worker in self._group.members)
            log.info("group %s of the trainer and the engines of %s", self._group.name, names)
        return self._group

    def _problem(self, group: EngineGroup, transfer: Transfer) -> str | None:
        """Waits for the end of the transfer; returns why it failed, naming the workers, or None."""
        limit = time.monotonic() + self._timeout_s
        while not transfer.done.wait(0.05):
            if lost := self._lost(group):
                return lost
            if time.monotonic() > limit:
                return f"not done after {self._timeout_s:.0f} s; {self._states(group)}"
        if transfer.error is None:
            return None
        blame = time.monotonic() + _BLAME_S
        while not (lost := self._lost(group)) and time.monotonic() < blame:
            time.sleep(0.05)
        return f"{lost or self._states(group)} ({type(transfer.error).__name__}: {transfer.error})"

    def _lost(self, group: EngineGroup) -> str | None:
        """Names the members that are gone, failed or restarted since the group was formed; None when all are there."""
        now = {worker.name: worker for worker in self._board.workers()}
        lost = []
        for member in group.members:
            report = now.get(member.name)
            if report is None:
                lost.append(f"{member.name} has fallen silent")
            elif report.epoch != member.epoch or report.state in ("failed", "starting"):
                lost.append(f"{report.name} is {report.state}: {report.detail or 'its engine was started again'}")
        return "; ".join(lost) or None

    def _states(self, group: EngineGroup) -> str:
        names = {member.name for member in group.members}
        return ", ".join(f"{w.name} is {w.state} {w.detail}".strip() for w in self._board.workers() if w.name in names)

    def write(self, version: int) -> WeightManifest:
        """Writes the files of the newest version. Raises NotFound when it is not `version`."""
        with self._copy.reading(version) as tensors:
            return write_version(tensors.items(), self._static_files, self._board.directory, self._run_id, version)

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Compares the weights that an engine has received with those that were sent.

        Checksums of engines on CPUs are compared with the trainer's own. On GPUs SGLang computes another function, so there
        the engines are compared with each other, when the last one has reported. Raises Conflict, in every engine's call, when
        they differ, and NotFound when there is a newer version.
        """
        own = digest_all({str(rank): digest_all(of_rank) for rank, of_rank in enumerate(sums.ranks)})
        if self._rendezvous.exact:
            wrong, compared, total = await asyncio.to_thread(self._copy.differing, version, sums.ranks[0])
            if wrong or not compared:
                raise Conflict(
                    f"{len(wrong)} of {compared} tensors in the engine of {sums.worker} are not what was sent",
                    field="checksums",
                    value=wrong[0] if wrong else "no name in common",
                )
            return WeightVerdict(checksum=own, compared=f"{compared} of {total} tensors with the trainer's")
        self._sums[sums.worker] = own
        members = await self._all_sums(version)
        if len({self._sums[name] for name in members}) > 1:
            text = ", ".join(f"{name} {self._sums[name][:8]}" for name in members)
            raise Conflict("the engines hold different weights", field="checksums", value=text)
        alone = len(members) == 1
        text = "nothing: there is no other engine" if alone else f"the engines of {len(members)} nodes with each other"
        return WeightVerdict(checksum=own, compared=text)

    async def _all_sums(self, version: int) -> list[str]:
        """Returns the group's members that are still there, once each has reported its checksum."""
        limit = time.monotonic() + self._timeout_s
        while time.monotonic() < limit:
            latest, group = self._board.latest(), self._group
            if latest is None or latest.version != version or latest.broadcast is None or group is None:
                raise NotFound("this broadcast is over", field="version", value=version)
            epochs = {worker.name: worker.epoch for worker in self._board.workers()}
            members = [member.name for member in group.members if epochs.get(member.name) == member.epoch]
            if all(name in self._sums for name in members):
                return members
            await asyncio.sleep(0.05)
        raise Conflict("the other engines did not report their checksums", field="checksums", value=sorted(self._sums))
