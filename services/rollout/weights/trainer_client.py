"""A rollout node's client of the trainer. The other end is `trainer.backends.server`, the calls of
`trainer.weights.board`.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.clients.base import Client, Look
from common.errors import ServiceError
from common.process import progress
from common.weights import recycled_files
from common.weights.checksums import Hasher
from common.wire.schemas import (
    ReportNoted,
    SentFile,
    WeightChecksums,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
)

# Seconds without a byte after which a connection is given up.
_READ_S = 30.0


@dataclass(frozen=True)
class WeightId:
    """Identifies weights by run and version, because version numbers repeat between runs."""

    run_id: str
    version: int

    @classmethod
    def of(cls, manifest: WeightManifest) -> "WeightId":
        return cls(manifest.run_id, manifest.version)

    def __str__(self) -> str:
        return f"weights {self.version} of run {self.run_id}"


class CorruptWeights(ServiceError):
    """A file does not match its manifest (502)."""

    status = 502
    code = "bad_weights"


class WeightsGone(ServiceError):
    """The trainer has removed this version (404 or 410) because there is a newer one."""

    status = 404
    code = "weights_gone"


class Download:
    """How much of a version of `size` bytes has arrived.

    Only bytes beyond the most so far are progress: what is fetched again after a failure is not.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.done = 0
        """Bytes of complete files."""
        self._most = 0
        self._most_read = 0

    def read(self, size: int) -> None:
        """Records that `size` bytes of the trainer's own files were compared with the manifest."""
        if size > self._most_read:
            self._most_read = size
            progress.moved()

    def at(self, size: int) -> None:
        """Records that `size` bytes of the current file are here."""
        if self.done + size > self._most:
            self._most = self.done + size
            progress.moved()

    def __str__(self) -> str:
        return f"{self._most / 1e6:.1f} of {self.size / 1e6:.1f} MB fetched"


async def write_file(
    chunks: AsyncIterator[bytes], file: SentFile, target: Path, download: Download
) -> None:
    """Writes a file to `target`, which must not exist, as its content arrives.

    Raises CorruptWeights for a wrong size or checksum.
    """
    digest = Hasher()
    size = 0
    with recycled_files.create(target, file.size) as stream:
        async for chunk in chunks:
            size += len(chunk)
            if size > file.size:
                break
            digest.update(chunk)
            stream.write(chunk)
            download.at(size)
    if size != file.size:
        raise CorruptWeights(
            f"the size differs from the manifest's {file.size} bytes", field=file.name, value=size
        )
    if digest.hexdigest() != file.xxh3:
        raise CorruptWeights(
            "the checksum does not match the manifest", field=file.name, value=digest.hexdigest()
        )


class TrainerClient(Client):
    """A rollout node's client of the trainer."""

    start_s = 60.0

    async def _look(self, attempt: str) -> Look:
        # Its progress is that of the training, not of this call.
        return (await super()._look(attempt))._replace(progress=None)

    async def latest(
        self,
        held: WeightId | None,
        wait_s: float,
        deadline_s: float,
        files: bool = False,
        asleep: bool = False,
    ) -> WeightManifest | None:
        """Returns the newest version, waiting up to `wait_s` seconds for one other than `held`;
        None before the first.

        Returns at once when the engine should sleep but is not `asleep`, or the other way round.
        With `files`, the trainer writes the files if it has not yet. Raises Unreachable after
        `deadline_s` seconds.
        """
        parameters = {
            "after_run": held.run_id if held else "",
            "after_version": held.version if held else -1,
            "wait_s": wait_s,
            "files": files,
            "asleep": asleep,
        }
        try:
            return await self.json(
                "GET", "/weights/latest", WeightManifest, params=parameters, deadline_s=deadline_s
            )
        except ServiceError as error:
            if error.status == 404:
                return None
            raise

    async def report(self, report: WorkerReport) -> bool:
        """Tells the trainer the state of this node. Returns whether its engine may get requests.
        Raises ServiceError.
        """
        noted = await self.json(
            "POST",
            f"/workers/{report.name}",
            ReportNoted,
            json=report.model_dump(),
            deadline_s=5,
        )
        return noted.may_serve

    async def verify(self, version: int, sums: WeightChecksums, deadline_s: float) -> WeightVerdict:
        """Verifies the checksums of a received broadcast. Raises ServiceError (409) when they
        differ.
        """
        return await self.json(
            "POST",
            f"/weights/{version}/verify",
            WeightVerdict,
            json=sums.model_dump(),
            deadline_s=deadline_s,
        )

    async def download(
        self, version: int, file: SentFile, target: Path, download: Download
    ) -> None:
        """Downloads a file to `target`, which must not exist.

        Raises CorruptWeights for a wrong size or checksum, WeightsGone when the trainer has removed
        the file, and httpx.TransportError when the connection fails.
        """
        path = f"/weights/{version}/files/{file.name}"
        timeout = httpx.Timeout(_READ_S, connect=10, pool=None)
        async with self.http.stream("GET", path, timeout=timeout) as response:
            if response.status_code in (404, 410):
                raise WeightsGone(
                    "the trainer does not have this file any more",
                    field="name",
                    value=f"{version}/{file.name}",
                )
            if not response.is_success:
                raise CorruptWeights(
                    f"HTTP {response.status_code} for a weight file",
                    field="name",
                    value=f"{version}/{file.name}",
                )
            await write_file(response.aiter_raw(), file, target, download)
