"""Weight versions on the node: downloaded from the trainer, verified, and kept on disk as model
directories. The other end is `trainer.weights.publisher`, which writes and serves them.

A directory gets its final name, such as `v000012`, once it holds every file of its version with the
right size and checksum. Unchanged files are hard links to an earlier version; for others only the
difference is fetched if an earlier version is held. Files are not synced. Instead, everything an
engine starts from is read and compared with the manifest again, because disks damage files.
"""

import asyncio
import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.clients.base import Client
from common.errors import ServiceError
from common.process import progress
from common.process.storage import storing
from common.weights import spares
from common.weights.checksums import PIECE_BYTES, Hasher, checksum
from common.weights.deltas import BadDelta, apply_delta
from common.wire.schemas import (
    SentFile,
    WeightChecksums,
    WeightFile,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
)

log = logging.getLogger(__name__)
_KEEP = 2
_ATTEMPTS = 3
_READ_S = 30.0
"""Seconds without a byte after which a connection is given up."""


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


class TrainerClient(Client):
    """A rollout node's client of the trainer."""

    start_s = 60.0

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
        parameters: dict[str, str | float] = {"wait_s": wait_s}
        if files:
            parameters["files"] = "true"
        if asleep:
            parameters["asleep"] = "true"
        if held is not None:
            parameters["after_run"] = held.run_id
            parameters["after_version"] = held.version

        try:
            return await self.json(
                "GET", "/weights/latest", WeightManifest, params=parameters, deadline_s=deadline_s
            )
        except ServiceError as error:
            if error.status == 404:
                return None
            raise

    async def report(self, report: WorkerReport) -> None:
        """Tells the trainer the state of this node. Raises ServiceError."""
        await self.request(
            "POST", f"/workers/{report.name}", json=report.model_dump(), deadline_s=5
        )

    async def verify(self, version: int, sums: WeightChecksums, deadline_s: float) -> WeightVerdict:
        """Verifies the checksums of a received broadcast. Raises ServiceError (409) when they
        differ.
        """
        path = f"/weights/{version}/verify"
        return await self.json(
            "POST", path, WeightVerdict, json=sums.model_dump(), deadline_s=deadline_s
        )

    async def download(
        self, version: int, file: SentFile, target: Path, download: Download
    ) -> None:
        """Downloads a file to `target`, which must not exist.

        Raises CorruptWeights for a wrong size or checksum, WeightsGone when the trainer has removed
        the file, and httpx.TransportError when the connection fails.
        """
        name = f"{version}/{file.name}"
        path = f"/weights/{version}/files/{file.name}"
        timeout = httpx.Timeout(_READ_S, connect=10, pool=None)
        digest = Hasher()
        size = 0
        async with self.http.stream("GET", path, timeout=timeout) as response:
            if response.status_code in (404, 410):
                raise WeightsGone(
                    "the trainer does not have this file any more", field="name", value=name
                )
            if not response.is_success:
                reason = f"HTTP {response.status_code} for a weight file"
                raise CorruptWeights(reason, field="name", value=name)

            with spares.create(target, file.size) as stream:
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                    if size > file.size:
                        break
                    digest.update(chunk)
                    stream.write(chunk)
                    download.at(size)

        if size != file.size:
            reason = f"the size differs from the manifest's {file.size} bytes"
            raise CorruptWeights(reason, field=file.name, value=size)
        if digest.hexdigest() != file.xxh3:
            raise CorruptWeights(
                "the checksum does not match the manifest",
                field=file.name,
                value=digest.hexdigest(),
            )


class WeightStore:
    """The weight versions on the node's disk, one directory each in `directory`.

    What an earlier process left there is removed: it may be damaged, and the trainer has newer
    weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        self._stored: list[tuple[WeightManifest, Path]] = []
        """The newest last."""
        self._held: Path | None = None

    def hold(self, path: Path | None) -> bool:
        """Protects this version, instead of the one held before, from removal. Returns False when
        it is not stored.

        This is needed because an engine reads its weights some time after its start.
        """
        self._held = path if any(path == stored for _, stored in self._stored) else None
        return self._held is not None

    async def verify(self, manifest: WeightManifest, path: Path) -> bool:
        """Compares a stored version with its manifest. When it differs, removes it, logs an error
        and returns False.
        """
        problem = await asyncio.to_thread(differs, path, manifest.files, progress.moved)
        if problem is None:
            return True
        log.error("the weights in %s are damaged; downloading them again: %s", path, problem)
        self._forget(path)
        return False

    async def fetch(
        self,
        manifest: WeightManifest,
        trainer: TrainerClient,
        download: Download | None = None,
    ) -> Path:
        """Returns the directory of this version: the trainer's if visible here, else a local one,
        fetched if needed; `download` shows how far it is.

        A version with deltas is always fetched, so that it can be the base of the next one.

        Raises CorruptWeights, WeightsGone, httpx.TransportError (after a few attempts) or
        StorageFailed, and changes nothing.
        """
        await asyncio.to_thread(self._forget_deleted)
        for known, path in self._stored:
            if _same(known, manifest):
                return path

        download = download or Download(sum(file.size for file in manifest.files))
        has_deltas = any(file.delta for file in manifest.files)
        if not has_deltas:
            shared = await shared_directory(manifest, download.read)
            if shared is not None:
                return shared

        # An engine may reload an evicted adapter by its path, so no other run may use that path.
        run = hashlib.sha256(manifest.run_id.encode()).hexdigest()[:12]
        suffix = f"-{run}" if manifest.kind == "adapter" else ""
        target = self.directory / f"v{manifest.version:06d}{suffix}"
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        download.done = 0
        try:
            with storing(
                f"weights {manifest.version}",
                self.directory,
                "state_dir",
                remedy="wait: the agent retries the download",
            ):
                partial.mkdir(parents=True)
                for file in manifest.files:
                    await self._store_file(
                        manifest, file, partial, trainer=trainer, download=download
                    )
                    download.done += file.size
                    download.at(0)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

        self._forget(target)  # another run's version, or other content
        partial.rename(target)
        self._stored.append((manifest, target))
        for _, old in self._stored[:-_KEEP]:
            if old != self._held:
                spares.discard(old)
                self._forget(old)
        return target

    async def _store_file(
        self,
        manifest: WeightManifest,
        file: WeightFile,
        directory: Path,
        *,
        trainer: TrainerClient,
        download: Download,
    ) -> None:
        """Stores a file in `directory` in the cheapest way that works: a link, a delta, or the
        whole file.
        """
        target = directory / file.name
        if await asyncio.to_thread(self._link, file, target):
            return
        if await self._patch(manifest, file, directory, trainer=trainer, download=download):
            return
        await _get(manifest, file, target, trainer=trainer, download=download)

    def _link(self, file: WeightFile, target: Path) -> bool:
        """Hard-links `target` to an identical file of another version; returns False when there is
        none.
        """
        for found in self._equal(file.xxh3, file.size):
            with contextlib.suppress(OSError):  # no hard links here, or too many: download instead
                target.hardlink_to(found)
                return True
        return False

    def _equal(self, xxh3: str, size: int) -> Iterator[Path]:
        """Yields the stored files with this checksum and size, the newest version first."""
        for manifest, path in reversed(self._stored):
            for known in manifest.files:
                if known.xxh3 == xxh3 and known.size == size:
                    yield path / known.name

    async def _patch(
        self,
        manifest: WeightManifest,
        file: WeightFile,
        directory: Path,
        *,
        trainer: TrainerClient,
        download: Download,
    ) -> bool:
        """Makes a file in `directory` from an earlier file and its delta; returns False when that
        is impossible.
        """
        if file.delta is None:
            return False
        base = next(self._equal(file.delta.base, file.size), None)
        if base is None:
            return False

        delta = directory / file.delta.name
        target = directory / file.name
        try:
            await _get(manifest, file.delta, delta, trainer=trainer, download=download)
            made = await asyncio.to_thread(apply_delta, base, delta, target)
        except (BadDelta, CorruptWeights) as error:
            made = str(error)
        finally:
            delta.unlink(missing_ok=True)
        if made == file.xxh3:
            return True

        target.unlink(missing_ok=True)
        log.error(
            "the delta of %s of weights %d is unusable, the whole file replaces it: %s",
            file.name,
            manifest.version,
            made,
        )
        return False

    def _forget_deleted(self) -> None:
        """Forgets the versions of which another program has deleted a file."""
        for manifest, path in list(self._stored):
            if any(not (path / file.name).is_file() for file in manifest.files):
                log.error("%s was deleted; downloading its weights again", path)
                self._forget(path)

    def _forget(self, path: Path) -> None:
        self._stored = [entry for entry in self._stored if entry[1] != path]
        if path.exists():
            shutil.rmtree(path)


def _same(known: WeightManifest, manifest: WeightManifest) -> bool:
    """Whether these are the same weights; the trainer may have changed how it sends them, or gone
    to sleep.
    """
    return (
        known.run_id == manifest.run_id
        and known.version == manifest.version
        and known.kind == manifest.kind
        and known.files == manifest.files
    )


async def shared_directory(
    manifest: WeightManifest, read: Callable[[int], None] = lambda _: None
) -> Path | None:
    """Returns the trainer's directory of this version when it is visible here and matches the
    manifest; calls `read` with the bytes read so far.
    """
    count = 0

    def piece() -> None:
        nonlocal count
        count += PIECE_BYTES
        read(count)

    if not manifest.directory:
        return None
    directory = Path(manifest.directory)
    problem = await asyncio.to_thread(differs, directory, manifest.files, piece)
    if problem is None:
        return directory
    log.error(
        "%s cannot be read here, weights %d are downloaded instead: %s; "
        "is the trainer's run_dir a volume mounted at that path?",
        directory,
        manifest.version,
        problem,
    )
    return None


def differs(directory: Path, files: list[WeightFile], read: Callable[[], None]) -> str | None:
    """Returns how the files differ from the manifest; None when they match. Calls `read` after
    every MiB.
    """
    if not directory.is_dir():
        return "there is no such directory"
    for file in files:
        path = directory / file.name
        try:
            size = path.stat().st_size
            if size != file.size:
                return f"{file.name} has {size} bytes, the manifest says {file.size}"
            if checksum(path, read) != file.xxh3:
                return f"the checksum of {file.name} does not match the manifest"
        except OSError as error:
            return str(error)
    return None


async def _get(
    manifest: WeightManifest,
    file: SentFile,
    target: Path,
    *,
    trainer: TrainerClient,
    download: Download,
) -> None:
    """Copies a file from the trainer's directory if visible here, else downloads it; `target` must
    not exist.
    """
    if manifest.directory:
        source = Path(manifest.directory) / file.name
        if await asyncio.to_thread(_copied, source, file, target, download=download):
            return

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            await trainer.download(manifest.version, file, target, download=download)
            return
        except (httpx.TransportError, CorruptWeights) as error:
            if attempt == _ATTEMPTS:
                raise
            log.warning(
                "download of %s of weights %d failed, trying again: %s",
                file.name,
                manifest.version,
                error,
            )
            await asyncio.to_thread(target.unlink, missing_ok=True)
            await asyncio.sleep(0.1 * 2**attempt)


def _copied(source: Path, file: SentFile, target: Path, *, download: Download) -> bool:
    """Copies `source`; returns False, without a target, when it is missing or does not match the
    manifest.
    """
    try:
        reader = source.open("rb")
    except OSError:
        return False
    digest = Hasher()
    with reader, spares.create(target, file.size) as writer:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
            writer.write(chunk)
            download.at(writer.tell())
    if digest.hexdigest() == file.xxh3:
        return True
    target.unlink()
    log.error("%s does not match the manifest; downloading the file instead", source)
    return False
