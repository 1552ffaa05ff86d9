"""Weight versions on the node: downloaded from the trainer, verified, and kept on disk as model directories.

A directory `v000012` gets its name when it holds every file of its version with the right size and SHA-256, synced to disk.
Unchanged files are hard links to an earlier version. Whatever this process has not written itself, and whatever an engine
starts from, is read and compared with the manifest again: disks and kills damage files.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import ValidationError

from common.clients import Client
from common.errors import ServiceError, shorten
from common.schemas import WeightChecksums, WeightFile, WeightManifest, WeightVerdict, WorkerReport
from common.storing import storing

log = logging.getLogger(__name__)
_MANIFEST = ".manifest.json"
"""Stored beside the files of a version; a `WeightFile` cannot have this name."""
_KEEP = 2
_ATTEMPTS = 3


@dataclass(frozen=True)
class WeightId:
    """Identifies weights by run and version: version numbers repeat between runs."""

    run_id: str
    version: int

    @classmethod
    def of(cls, manifest: WeightManifest) -> "WeightId":
        return cls(manifest.run_id, manifest.version)


class CorruptWeights(ServiceError):
    """A file does not match its manifest (502)."""

    status = 502
    code = "bad_weights"


class WeightsGone(ServiceError):
    """The trainer has removed this version (404 or 410), since there is a newer one."""

    status = 404
    code = "weights_gone"


class TrainerClient(Client):
    """A rollout node's client of the trainer."""

    async def latest(
        self, held: WeightId | None, wait_s: float, deadline_s: float, files: bool = False
    ) -> WeightManifest | None:
        """Returns the newest version, after up to `wait_s` seconds while it is still `held`; None before the first.

        With `files` the trainer writes the files unless it has. Raises Unreachable after `deadline_s` seconds.
        """
        parameters: dict[str, str | float] = {"wait_s": wait_s} | ({"files": "true"} if files else {})
        if held is not None:
            parameters |= {"after_run": held.run_id, "after_version": held.version}
        try:
            return await self.json("GET", "/weights/latest", WeightManifest, params=parameters, deadline_s=deadline_s)
        except ServiceError as error:
            if error.status == 404:
                return None
            raise

    async def report(self, report: WorkerReport) -> None:
        await self.request("POST", f"/workers/{report.name}", json=report.model_dump(), deadline_s=5)

    async def verify(self, version: int, sums: WeightChecksums, deadline_s: float) -> WeightVerdict:
        """Verifies the checksums of a received broadcast. Raises ServiceError (409) when they differ."""
        path = f"/weights/{version}/verify"
        return await self.json("POST", path, WeightVerdict, json=sums.model_dump(), deadline_s=deadline_s)

    async def download(self, version: int, file: WeightFile, target: Path) -> None:
        """Downloads a file to `target`, which must not exist, and syncs it to disk.

        Raises CorruptWeights for a wrong size or checksum, WeightsGone when the trainer has removed the file, and
        httpx.TransportError when the connection fails.
        """
        timeout = httpx.Timeout(30, connect=10, pool=None)
        digest, size = hashlib.sha256(), 0
        async with self.http.stream("GET", f"/weights/{version}/files/{file.name}", timeout=timeout) as response:
            if response.status_code in (404, 410):
                raise WeightsGone("the trainer has removed this file", field="name", value=f"{version}/{file.name}")
            if not response.is_success:
                raise CorruptWeights(
                    f"HTTP {response.status_code} for a weight file", field="name", value=f"{version}/{file.name}"
                )
            with target.open("xb") as stream:  # "x": never write into a link to another version
                async for chunk in response.aiter_bytes(1 << 20):
                    size += len(chunk)
                    if size > file.size:
                        break
                    digest.update(chunk)
                    stream.write(chunk)
                stream.flush()
                await asyncio.to_thread(os.fsync, stream.fileno())
        if size != file.size:
            raise CorruptWeights(f"the size differs from the manifest's {file.size} bytes", field=file.name, value=size)
        if digest.hexdigest() != file.sha256:
            raise CorruptWeights("the checksum does not match the manifest", field=file.name, value=digest.hexdigest())


class WeightStore:
    """The verified weight versions on the node's disk, one directory each in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob("*.partial"):
            shutil.rmtree(leftover)
        self._stored = self._scan()
        self._inherited = {path for _, path in self._stored}
        """What an earlier process left, until it is verified."""
        self._held: Path | None = None

    def hold(self, path: Path | None) -> bool:
        """Keeps this version, instead of the one held before, when newer ones arrive; returns False when it is not stored.

        An engine reads its weights some time after its start.
        """
        self._held = path if any(path == stored for _, stored in self._stored) else None
        return self._held is not None

    async def verify(self, manifest: WeightManifest, path: Path) -> bool:
        """Reads a stored version; removes it, and says so, when it is not what the manifest says."""
        problem = await asyncio.to_thread(_differs, path, manifest.files)
        if problem is None:
            self._inherited.discard(path)
            return True
        log.error("the weights in %s are damaged and not used, they are downloaded again: %s", path, problem)
        self._forget(path)
        return False

    def _scan(self) -> list[tuple[WeightManifest, Path]]:
        """Returns the complete versions, the newest last."""
        stored: list[tuple[float, WeightManifest, Path]] = []
        for path in self.directory.glob(f"v*/{_MANIFEST}"):
            try:
                manifest = WeightManifest.model_validate_json(path.read_bytes())
                complete = all((path.parent / file.name).stat().st_size == file.size for file in manifest.files)
            except (OSError, ValidationError) as error:
                log.warning("%s is not used: %s", path.parent, shorten(str(error)))
                continue
            if complete:
                stored.append((path.stat().st_mtime, manifest, path.parent))
        return [(manifest, path) for _, manifest, path in sorted(stored, key=lambda entry: entry[0])]

    async def fetch(self, manifest: WeightManifest, trainer: TrainerClient) -> Path:
        """Returns the directory of this version, after downloading it if needed.

        Raises CorruptWeights, WeightsGone, httpx.TransportError (after a few attempts) or StorageFailed, and changes nothing.
        """
        for known, path in list(self._stored):
            if known == manifest and (path not in self._inherited or await self.verify(known, path)):
                return path
        # An engine may reload an evicted adapter by its path, so no other run may use that path.
        run = hashlib.sha256(manifest.run_id.encode()).hexdigest()[:12]
        suffix = f"-{run}" if manifest.kind == "adapter" else ""
        target = self.directory / f"v{manifest.version:06d}{suffix}"
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with storing(f"weights {manifest.version}", self.directory, "state_dir", "wait: the download is retried"):
                partial.mkdir()
                for file in manifest.files:
                    if not await asyncio.to_thread(self._link, file, partial / file.name):
                        await _download(trainer, manifest.version, file, partial / file.name)
                (partial / _MANIFEST).write_text(manifest.model_dump_json())
                _sync(partial / _MANIFEST, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._forget(target)  # another run's version, or other content
        partial.rename(target)
        _sync(self.directory)
        self._stored.append((manifest, target))
        for _, old in self._stored[:-_KEEP]:
            if old != self._held:
                self._forget(old)
        return target

    def _link(self, file: WeightFile, target: Path) -> bool:
        """Links `target` to an equal file of another version; returns False when there is none."""
        for manifest, path in reversed(self._stored):
            for known in manifest.files:
                if (known.sha256, known.size) == (file.sha256, file.size):
                    if path in self._inherited and _differs(path, [known]):
                        continue
                    with contextlib.suppress(OSError):  # no hard links here, or too many: download instead
                        target.hardlink_to(path / known.name)
                        return True
        return False

    def _forget(self, path: Path) -> None:
        self._stored = [entry for entry in self._stored if entry[1] != path]
        self._inherited.discard(path)
        if path.exists():
            shutil.rmtree(path)


async def shared_directory(manifest: WeightManifest) -> Path | None:
    """Returns the trainer's directory of this version when it is visible here and matches the manifest."""
    if not manifest.directory:
        return None
    directory = Path(manifest.directory)
    if (problem := await asyncio.to_thread(_differs, directory, manifest.files)) is None:
        return directory
    text = (
        "%s cannot be read here, weights %d are downloaded instead: %s; is the trainer's run_dir a volume mounted at that path?"
    )
    log.error(text, directory, manifest.version, problem)
    return None


def _differs(directory: Path, files: list[WeightFile]) -> str | None:
    """Returns how the files differ from the manifest, or None."""
    if not directory.is_dir():
        return "there is no such directory"
    for file in files:
        try:
            if (size := (directory / file.name).stat().st_size) != file.size:
                return f"{file.name} has {size} bytes, the manifest says {file.size}"
            with (directory / file.name).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    return f"the checksum of {file.name} does not match the manifest"
        except OSError as error:
            return str(error)
    return None


async def _download(trainer: TrainerClient, version: int, file: WeightFile, target: Path) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            await trainer.download(version, file, target)
            return
        except (httpx.TransportError, CorruptWeights) as error:
            if attempt == _ATTEMPTS:
                raise
            log.warning("download of %s of weights %d failed, trying again: %s", file.name, version, error)
            await asyncio.to_thread(target.unlink, missing_ok=True)
            await asyncio.sleep(0.1 * 2**attempt)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
