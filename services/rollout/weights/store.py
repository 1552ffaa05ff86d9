"""Weight versions on the node: fetched from the trainer, verified, and kept on disk as model
directories. The other end is `trainer.weights.versions`, which writes them.

A directory gets its final name, such as `v000012`, once it holds every file of its version with the
right size and checksum. Unchanged files are hard links to an earlier version; for others only the
difference is fetched if an earlier version is held. Files are not synced. Instead, everything an
engine starts from is read and compared with the manifest again, because disks damage files.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx

from common.process import progress
from common.process.storage import storing
from common.weights import recycled_files
from common.weights.checksums import PIECE_BYTES, checksum
from common.weights.deltas import BadDelta, apply_delta
from common.wire.schemas import SentFile, WeightFile, WeightManifest
from services.rollout.weights.trainer_client import (
    CorruptWeights,
    Download,
    TrainerClient,
    WeightId,
    write_file,
)

log = logging.getLogger(__name__)
_KEEP = 2
_ATTEMPTS = 3


class WeightStore:
    """The weight versions on the node's disk, one directory each in `directory`.

    What an earlier process left there is removed: it may be damaged, and the trainer has newer
    weights.
    """

    def __init__(self, directory: Path, trainer: TrainerClient) -> None:
        self.directory = directory.absolute()
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        self.download = Download(0)
        """How far the version is that was fetched last."""
        self._trainer = trainer
        self._fetched: WeightId | None = None
        # The newest last.
        self._stored: list[tuple[WeightManifest, Path]] = []
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

    async def fetch(self, manifest: WeightManifest) -> Path:
        """Returns the directory of this version: the trainer's if visible here, else a local one,
        fetched if needed.

        A version with deltas is always fetched, so that it can be the base of the next one.

        Raises CorruptWeights, WeightsGone, httpx.TransportError (after a few attempts) or
        StorageFailed, and changes nothing.
        """
        if WeightId.of(manifest) != self._fetched:  # otherwise it is tried again
            self._fetched = WeightId.of(manifest)
            self.download = Download(sum(file.size for file in manifest.files))
        await asyncio.to_thread(self._forget_deleted)
        for known, path in list(self._stored):
            # It may have been stored long ago, and not been loaded since.
            if _same(known, manifest) and await self.verify(manifest, path):
                return path

        # The trainer removes its files, so they cannot be the base of the next delta.
        has_deltas = any(file.delta for file in manifest.files)
        if not has_deltas:
            shared = await self._shared_directory(manifest)
            if shared is not None:
                return shared

        # An engine may reload an evicted adapter by its path, so no other run may use that path.
        run = hashlib.sha256(manifest.run_id.encode()).hexdigest()[:12]
        suffix = f"-{run}" if manifest.kind == "adapter" else ""
        target = self.directory / f"v{manifest.version:06d}{suffix}"
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        self.download.done = 0
        remedy = "wait: the agent retries the download"
        try:
            with storing(f"weights {manifest.version}", self.directory, "state_dir", remedy):
                partial.mkdir(parents=True)
                for file in manifest.files:
                    await self._store_file(manifest, file, partial)
                    self.download.done += file.size
                    self.download.at(0)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

        # Only a complete version has its final name, whenever this process is killed.
        self._forget(target)  # another run's version, or other content
        partial.rename(target)
        self._stored.append((manifest, target))
        for _, old in self._stored[:-_KEEP]:
            if old != self._held:
                recycled_files.discard(old)
                self._forget(old)
        return target

    async def _store_file(
        self, manifest: WeightManifest, file: WeightFile, directory: Path
    ) -> None:
        """Stores a file in `directory` in the cheapest way that works: a link, a delta, or the
        whole file.
        """
        target = directory / file.name
        for found in self._equal(file.xxh3, file.size):
            with contextlib.suppress(OSError):  # no hard links here, or too many
                target.hardlink_to(found)
                return
        if not await self._patch(manifest, file, directory):
            await self._get(manifest, file, target)

    def _equal(self, xxh3: str, size: int) -> Iterator[Path]:
        """Yields the stored files with this checksum and size, the newest version first."""
        for manifest, path in reversed(self._stored):
            for known in manifest.files:
                if known.xxh3 == xxh3 and known.size == size:
                    yield path / known.name

    async def _patch(self, manifest: WeightManifest, file: WeightFile, directory: Path) -> bool:
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
            await self._get(manifest, file.delta, delta)
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

    async def _get(self, manifest: WeightManifest, file: SentFile, target: Path) -> None:
        """Copies a file from the trainer's directory if visible here, else downloads it; `target`
        must not exist.
        """
        source = Path(manifest.directory) / file.name
        if manifest.directory and os.access(source, os.R_OK):
            try:
                await write_file(_chunks(source), file, target, self.download)
                return
            except CorruptWeights as error:
                log.error("%s: %s; downloading the file instead", source, error)
                await asyncio.to_thread(target.unlink)

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._trainer.download(manifest.version, file, target, self.download)
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

    async def _shared_directory(self, manifest: WeightManifest) -> Path | None:
        """Returns the trainer's directory of this version when it is visible here and matches the
        manifest.
        """
        if not manifest.directory:
            return None
        count = 0
        download = self.download

        def read() -> None:
            nonlocal count
            count += PIECE_BYTES
            download.read(count)

        directory = Path(manifest.directory)
        problem = await asyncio.to_thread(differs, directory, manifest.files, read)
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


async def _chunks(source: Path) -> AsyncIterator[bytes]:
    with source.open("rb") as stream:
        while chunk := await asyncio.to_thread(stream.read, PIECE_BYTES):
            yield chunk
