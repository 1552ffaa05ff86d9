"""Weights straight from the trainer into the running engines, and files for whoever could not take part."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from common.errors import Conflict, NotFound
from common.schemas import WeightChecksums, WeightManifest, WeightVerdict, WorkerReport
from learning.weight_group import digest_all
from trainer.weights.host_copy import BUCKET_BYTES, Snapshot
from trainer.weights.publisher import WeightBoard, Weights, write_version
from trainer.weights.transfer import EngineGroup, Meeting, Transfer

log = logging.getLogger(__name__)
_BLAME_S = 3.0
"""How long to wait, after a broadcast broke off, for the report that tells whose engine it was."""


class Broadcaster:
    """Announces a version, sends it to the engines that are ready, and answers those that ask for files.

    Args:
        board: where versions are announced.
        static_files: that make a version a complete model directory.
        run_id: of this training run.
        timeout_s: for rendezvous and sending.
        meeting: where the engines find this process.
    """

    def __init__(
        self,
        board: WeightBoard,
        static_files: list[Path],
        run_id: str,
        timeout_s: float,
        meeting: Meeting,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._board, self._static_files, self._run_id = board, static_files, run_id
        self._timeout_s, self._meeting = timeout_s, meeting
        self._snapshot = Snapshot(pinned=meeting.backend == "nccl", bucket_bytes=bucket_bytes)
        self._group: EngineGroup | None = None
        self._sums: dict[str, str] = {}
        """Of each engine that has received the newest version."""
        board.source = self

    def publish(self, weights: Weights, version: int) -> tuple[WeightManifest, int]:
        """Announces and sends; returns what was announced last, and the bytes. Confirmation is the caller's."""
        snapshot = self._snapshot
        with snapshot.lock:  # a node that asks for files of a version as soon as it is announced waits until it is there
            if first := not snapshot.buckets:
                snapshot.fill(weights, version)
            group, self._sums = self._group_of([w for w in self._board.workers() if w.state == "ready"]), {}
            broadcast = group.announcement(snapshot.buckets) if group else None
            manifest = WeightManifest(version=version, run_id=self._run_id, broadcast=broadcast)
            self._board.announce(manifest)
            transfer = Transfer(group, snapshot.flats) if group else None
            put: Callable[[int], None] = transfer.put if transfer else lambda _: None
            if first:
                for index in range(len(snapshot.flats)):
                    put(index)
            else:
                snapshot.fill(weights, version, put)
        if group and transfer:
            transfer.finish()
            snapshot.prepare(version)
            if problem := self._problem(group, transfer):
                log.error("weights %d were not broadcast, they go over HTTP: %s", version, problem)
                group.close(stuck=not transfer.done.is_set())
                manifest = self._board.withdraw(manifest)
        return manifest, snapshot.size

    def settle(self) -> None:
        """After confirmation: a group that an engine has fallen out of is not used again."""
        group = self._group
        if group is not None and not group.closed and (problem := self._lost(group)):
            log.error("the group of trainer and engines is formed anew: %s", problem)
            group.close()

    def close(self) -> None:
        """Leaves the group: connections that are open when the interpreter ends could abort it."""
        if self._group is not None and not self._group.closed:
            self._group.close()

    def _group_of(self, members: list[WorkerReport]) -> EngineGroup | None:
        if self._group is not None and not self._group.fits(members):
            if not self._group.closed:
                self._group.close()
            self._group = None
        if self._group is None and members:
            try:
                self._group = EngineGroup(members, self._meeting, self._timeout_s)
            except RuntimeError as error:
                log.error("no group can be formed at %s, weights go over HTTP: %s", self._meeting.address, error)
                return None
            names = ", ".join(f"{worker.name} ({worker.tensor_parallel_size})" for worker in self._group.members)
            log.info("group %s of the trainer and the engines of %s", self._group.name, names)
        return self._group

    def _problem(self, group: EngineGroup, transfer: Transfer) -> str | None:
        """Waits for the end of the transfer; why it failed, naming the workers, or None."""
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
        """Which members are not what they were when the group was formed."""
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

    # ------------------------------------------------------------ asked by agents, through the board

    def write(self, version: int) -> WeightManifest:
        """Writes the files of the newest version. Raises NotFound when it is not `version`."""
        with self._snapshot.reading(version) as tensors:
            directory = self._board.directory
            return write_version(tensors.items(), self._static_files, directory, self._run_id, version)

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Compares what an engine has received with what was sent.

        Checksums of engines on CPUs are compared with the trainer's own; on GPUs SGLang computes another function, so there
        the engines are compared with each other, when the last one has reported. Raises Conflict when they differ, for all
        of them then, and NotFound when there is a newer version.
        """
        own = digest_all({str(rank): digest_all(of_rank) for rank, of_rank in enumerate(sums.ranks)})
        if self._meeting.exact:
            wrong, compared, total = await asyncio.to_thread(self._snapshot.differing, version, sums.ranks[0])
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
        """The group's members that are still there, once each has reported its checksum."""
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
