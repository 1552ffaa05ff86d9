"""Weight versions: written by the trainer, pulled by every rollout node's agent, confirmed by each.

A version is a complete Hugging Face directory `v000012/`, or a LoRA adapter in PEFT's format; its manifest (sizes and
SHA-256) is made last. A version is the optimiser step that made it. `WeightBoard` keeps what the trainer's HTTP app serves;
`Publisher` writes a version, announces it and waits until every rollout node has confirmed it. A node that does not is fenced
from traffic.

With `trainer.weight_sync` distributed a version is broadcast into the engines (`broadcast.py`); its directory is then
written only when a node asks for it.
"""

import asyncio
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from safetensors.torch import save_file
from torch import Tensor

from common import watchdog
from common.errors import NotFound, ServiceError, TooLarge
from common.schemas import WeightChecksums, WeightFile, WeightManifest, WeightVerdict, WorkerReport, WorkerState
from common.storing import storing
from trainer.policy.scorer import is_adapter

log = logging.getLogger(__name__)
Weights = Iterable[tuple[str, Tensor]]
"""Tensors by their Hugging Face names, each once."""
_KEEP = 3
"""Versions kept on disk: a slow node may still be downloading the one before the newest."""
_SILENT_S = 30.0
"""A worker that did not report for this long is counted as gone."""
_FORGOTTEN_S = 600.0
_MAX_WORKERS = 1000


class PublishFailed(ServiceError):
    """No rollout node serves the new weights: generating would be off-policy without anybody knowing."""

    code = "publish_failed"


def version_name(version: int) -> str:
    """Name of a version's directory."""
    return f"v{version:06d}"


def write_version(weights: Weights, static_files: list[Path], directory: Path, run_id: str, version: int) -> WeightManifest:
    """Writes `directory/v000012/` and returns its manifest; atomic, so a directory of that name is complete.

    Raises StorageFailed when the disk is full; then it is as it was.
    """
    target = directory / version_name(version)
    partial = target.with_suffix(".partial")
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with storing(
            f"weights {version}", target, "trainer.run_dir", "start again: the run goes on from its newest checkpoint"
        ):
            return _write_version(weights, static_files, partial, target, run_id, version)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # it would keep the disk full
        raise


def _write_version(
    weights: Weights, static_files: list[Path], partial: Path, target: Path, run_id: str, version: int
) -> WeightManifest:
    partial.mkdir(parents=True)
    for file in static_files:
        _link_or_copy(file, partial / file.name)
    kind: Literal["model", "adapter"] = "adapter" if is_adapter(partial) else "model"
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
    save_file(tensors, partial / f"{'adapter_model' if kind == 'adapter' else 'model'}.safetensors", metadata={"format": "pt"})
    known = {file.name: _static_sha256(file, file.stat().st_mtime_ns) for file in static_files}
    files = [
        WeightFile(name=file.name, size=file.stat().st_size, sha256=known.get(file.name) or _sha256(file))
        for file in sorted(partial.iterdir())
    ]
    partial.rename(target)
    return WeightManifest(version=version, run_id=run_id, files=files, kind=kind)


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(file, target)


@lru_cache(maxsize=64)
def _static_sha256(file: Path, _modified: int) -> str:
    return _sha256(file)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Source(Protocol):
    """What was broadcast: files of it for a node that could not take part, and whether an engine has received it well."""

    def write(self, version: int) -> WeightManifest: ...

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict: ...


class WeightBoard:
    """The newest weight version and what every rollout node reported. Used from the HTTP thread and the training loop.

    Versions that an earlier attempt left in `directory` are removed: they belong to another run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        self._closed = False
        self._lock = threading.Condition()
        self._latest: WeightManifest | None = None
        self._workers: dict[str, tuple[WorkerReport, float]] = {}
        self._met = False  # whether all rollout nodes were there once
        self._left_behind: set[str] = set()
        self._writing = threading.Lock()
        self._news: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.source: Source | None = None
        """Of versions that are announced without files."""

    def announce(self, manifest: WeightManifest) -> None:
        """Makes `manifest` the latest version and removes old ones from disk."""
        with self._lock:
            self._latest = manifest
            self._lock.notify_all()
        self._wake()
        self._remove_old()

    def _wake(self) -> None:
        """Lets those look who wait for a new version."""
        for event, loop in list(self._news.items()):
            with suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(event.set)

    def _remove_old(self) -> None:
        for old in sorted(self.directory.glob("v*"))[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def withdraw(self, manifest: WeightManifest) -> WeightManifest:
        """The version stays the latest one, as files only."""
        with self._lock:
            self._latest = withdrawn = (self._latest or manifest).model_copy(update={"broadcast": None})
        self._wake()
        return withdrawn

    async def with_files(self, manifest: WeightManifest) -> WeightManifest:
        """This version with its files, written now if they are not there yet. Raises NotFound when it is gone."""
        source = self.source
        if manifest.files or source is None:
            return manifest
        return await asyncio.to_thread(self._write, source, manifest)

    def _write(self, source: Source, manifest: WeightManifest) -> WeightManifest:
        with self._writing:
            latest = self._latest
            if latest is not None and latest.version == manifest.version and latest.files:
                return latest
            log.info("files of weights %d are written: a node asks for them", manifest.version)
            written = source.write(manifest.version)
            with self._lock:
                if self._latest is not None and self._latest.version == written.version:
                    # What is announced stays, so that nobody who is in the broadcast takes it for withdrawn.
                    self._latest = self._latest.model_copy(update={"files": written.files})
            self._remove_old()
            return written

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Raises Conflict when the engine did not receive what was sent, NotFound when this version is not broadcast."""
        if self.source is None:
            raise NotFound("no weights were broadcast", field="version", value=version)
        return await self.source.verify(version, sums)

    def close(self) -> None:
        """Ends the calls that wait for a new version, so that the HTTP server can end."""
        self._closed = True
        self._wake()

    def latest(self) -> WeightManifest | None:
        return self._latest

    async def latest_after(self, run_id: str, version: int, wait_s: float) -> WeightManifest:
        """The latest version, as soon as it differs from (run_id, version), at the latest after `wait_s` seconds.

        Raises NotFound when there is none by then.
        """

        def news() -> bool:
            latest = self._latest
            return latest is not None and (latest.run_id, latest.version) != (run_id, version)

        event = asyncio.Event()
        self._news[event] = asyncio.get_running_loop()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not (news() or self._closed):
                        event.clear()
                        if not (news() or self._closed):  # it may have come just before
                            await event.wait()
        finally:
            del self._news[event]
        if (latest := self._latest) is None:
            raise NotFound("no weight version was published yet", remedy="ask again; the trainer is starting")
        return latest

    def file(self, version: int, name: str) -> Path:
        """Path of one file of a version. Raises NotFound when the version or the file is not there (any more)."""
        path = self.directory / version_name(version) / name
        try:
            found = "/" not in name and not name.startswith(".") and path.is_file()
        except OSError:  # a name that is too long for the file system
            found = False
        if not found:
            raise NotFound("no such weight file", field="name", value=f"{version}/{name}", remedy="ask /weights/latest again")
        return path

    def report(self, report: WorkerReport) -> None:
        """What an agent says of its engine."""
        with self._lock:
            previous = self._workers.get(report.name)
            now = time.monotonic()
            alive = {name: entry for name, entry in self._workers.items() if now - entry[1] < _FORGOTTEN_S}
            if len(alive) >= _MAX_WORKERS and report.name not in alive:
                raise TooLarge("too many workers report", field="name", value=report.name, remedy=f"at most {_MAX_WORKERS}")
            self._workers = alive | {report.name: (report, now)}
            self._lock.notify_all()
        if report.state in ("stale", "failed") and (previous is None or previous[0].state != report.state):
            log.warning("%s is %s (weights %s): %s", report.name, report.state, report.version, report.detail)

    def workers(self) -> list[WorkerReport]:
        """The reports of the workers that are alive."""
        now = time.monotonic()
        with self._lock:
            return [report for report, at in self._workers.values() if now - at < _SILENT_S]

    def num_nodes(self) -> int:
        """Rollout nodes of the job group, as the agents say; 1 before any of them has."""
        with self._lock:
            return max((report.num_nodes for report, _ in self._workers.values()), default=1)

    def count(self, state: WorkerState) -> int:
        """Workers that are alive and in this state."""
        return sum(worker.state == state for worker in self.workers())

    def _silent(self) -> list[WorkerReport]:
        """The last reports of the workers that were alive and are not, and were not returned yet."""
        alive = {worker.name for worker in self.workers()} | self._left_behind
        with self._lock:
            return [report for name, (report, _) in self._workers.items() if name not in alive]

    def _leave_behind(self, workers: list[WorkerReport]) -> list[WorkerReport]:
        self._left_behind.update(worker.name for worker in workers)
        return workers

    def wait_confirmed(self, manifest: WeightManifest, timeout_s: float, say: Callable[[str], None]) -> list[WorkerReport]:
        """Waits until the rollout nodes serve `manifest`; returns the ones that do not after `timeout_s` seconds.

        The first time it waits for as many nodes as the agents say there are. After that a node that was returned before is
        not waited for until it has caught up by itself. One that has fallen silent is returned at once: its engine may live on,
        on old weights. Raises PublishFailed when nobody serves the manifest.
        """
        start = said = time.monotonic()
        say_after_s = 10.0
        while True:
            workers = self.workers()
            current = {
                w.name for w in workers if (w.run_id, w.version, w.state) == (manifest.run_id, manifest.version, "ready")
            }
            self._left_behind -= current
            awaited = [w for w in workers if w.name not in current and w.name not in self._left_behind]
            expected = max((w.num_nodes for w in workers), default=1)
            if current and not awaited and (self._met or len(workers) >= expected):
                self._met = True
                return self._leave_behind(self._silent())
            now = time.monotonic()
            text = ", ".join(f"{w.name} ({w.state}, weights {w.version}) {w.detail}".strip() for w in awaited)
            served = f"{len(current)} of {expected} rollout nodes serve weights {manifest.version}"
            waited = f"{served}; missing: {text or 'no report'}"
            if now - start > timeout_s:
                watchdog.deadline_passed(f"after {timeout_s:.0f} s {waited}")
                if not current:
                    raise PublishFailed(f"after {timeout_s:.0f} s {waited}", remedy="look at the log of rollout-server")
                log.error("after %.0f s %s; training goes on without them until they catch up", timeout_s, waited)
                self._met = True
                return self._leave_behind([*awaited, *self._silent()])
            if now - said > say_after_s:
                say(f"waiting since {now - start:.0f} s: {waited}")
                said, say_after_s = now, min(60.0, 2 * say_after_s)
            with self._lock:
                self._lock.wait(timeout=0.2)


class Fence(Protocol):
    """Takes a worker out of traffic."""

    def __call__(self, worker: WorkerReport) -> None: ...


class Broadcasts(Protocol):
    """Sends weights straight into the engines."""

    def publish(self, weights: Weights, version: int) -> tuple[WeightManifest, int]: ...

    def settle(self) -> None: ...


class Publisher:
    """Publishes the learner's weights and waits for every rollout node. One thread at a time.

    Args:
        board: where versions are announced and confirmed.
        static_files: config and tokenizer files that make a version a complete model directory.
        run_id: of this training run.
        timeout_s: for all nodes to confirm.
        fence: called for a node that did not confirm in time.
        say: tells a person what is awaited.
        published: is told bytes and seconds of every version.
        shared: tell the nodes where the files are, for those that see the same disk.
        broadcaster: sends the tensors; None: versions are written to files.
    """

    def __init__(
        self,
        board: WeightBoard,
        static_files: list[Path],
        run_id: str,
        timeout_s: float,
        fence: Fence,
        say: Callable[[str], None],
        *,
        published: Callable[[int, float], None] | None = None,
        shared: bool = False,
        broadcaster: Broadcasts | None = None,
    ) -> None:
        self._board, self._static_files, self.run_id = board, static_files, run_id
        self._timeout_s, self._fence, self._say = timeout_s, fence, say
        self._shared, self._broadcaster = shared, broadcaster
        self._published = published

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the rollout nodes generate with exactly these weights. Raises PublishFailed when none does."""
        begin = time.monotonic()
        if self._broadcaster is None:
            manifest = write_version(weights, self._static_files, self._board.directory, self.run_id, version)
            if self._shared:
                manifest.directory = str((self._board.directory / version_name(version)).absolute())
            self._board.announce(manifest)
            size = sum(file.size for file in manifest.files)
        else:
            manifest, size = self._broadcaster.publish(weights, version)
        for worker in self._board.wait_confirmed(manifest, self._timeout_s, self._say):
            self._fence(worker)
        if self._broadcaster is not None:
            self._broadcaster.settle()
        seconds = time.monotonic() - begin
        if self._published:
            self._published(size, seconds)
        way = "broadcast" if manifest.broadcast else "shared" if manifest.directory else "http"
        rate = size / seconds / 1e6
        level = logging.INFO if seconds >= 1 else logging.DEBUG  # the line of a step has its seconds anyway
        log.log(level, "weights %d: %.1f MB in %.2f s (%.0f MB/s) by %s", version, size / 1e6, seconds, rate, way)


def write_static_files(model: Any, tokenizer: Any, directory: Path) -> list[Path]:
    """Config, generation config and tokenizer, written once; returns their paths."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sorted(path for path in directory.iterdir() if path.is_file())
