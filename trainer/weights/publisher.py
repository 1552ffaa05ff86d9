"""Weight versions: written by the trainer, pulled by every rollout node's agent, confirmed by each.

A version is named after the optimiser step that made it. It is a complete Hugging Face directory
`v000012/`, or a LoRA adapter in PEFT's format; its manifest (sizes and checksums) is made last. A
file may come with its delta from the previous version (`common.weights.deltas`), for nodes that
have that version. With `trainer.weight_sync` distributed a version is broadcast into the engines
(`broadcast.py`); its directory is then written only when a node asks for it.

The other end is `services.rollout.weights`: `follow` keeps an engine on the newest version, `store`
downloads and verifies it.
"""

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from common.errors import NotFound, ServiceError, TooLarge
from common.process import watchdog
from common.process.storage import storing
from common.weights import spares
from common.weights.checksums import checksum
from common.weights.deltas import write_delta
from common.wire.schemas import (
    WeightChecksums,
    WeightDelta,
    WeightFile,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
    WorkerState,
)
from learning.staging import on_host
from trainer.policy.scorer import is_adapter
from trainer.weights.tensor_file import write_tensors

if TYPE_CHECKING:
    from trainer.weights.broadcast import Broadcaster

log = logging.getLogger(__name__)
Weights = Iterable[tuple[str, Tensor]]
"""(Hugging Face name, tensor), each name once."""
_KEEP = 3
"""Versions that stay on disk: a slow node may still download the one before the newest."""
_SILENT_S = 30.0
"""A worker that has not reported for this long counts as gone."""
_FORGOTTEN_S = 600.0
_MAX_WORKERS = 1000


class PublishFailed(ServiceError):
    """No rollout node serves the new weights: going on would silently train on off-policy
    samples.
    """

    code = "publish_failed"


def version_name(version: int) -> str:
    """Returns the name of a version's directory."""
    return f"v{version:06d}"


def write_version(
    weights: Weights,
    static_files: list[Path],
    directory: Path,
    run_id: str,
    version: int,
    previous: WeightManifest | None = None,
) -> WeightManifest:
    """Writes `directory/v000012/` and returns its manifest; atomic, so a directory of that name is
    complete.

    With `previous`, also writes deltas from that version, whose files are in `directory` too.

    Raises StorageFailed when the disk is full, and then leaves no partial version behind.
    """
    target = directory / version_name(version)
    partial = target.with_suffix(".partial")
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    remedy = "start again: the run continues from its newest checkpoint"
    try:
        with storing(f"weights {version}", target, "trainer.run_dir", remedy):
            partial.mkdir(parents=True)
            for file in static_files:
                _link_or_copy(file, partial / file.name)
            kind: Literal["model", "adapter"] = "adapter" if is_adapter(partial) else "model"
            name = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
            tensors = on_host(weights)
            sums = {file.name: checksum(file) for file in partial.iterdir()}
            with spares.create(
                partial / name, sum(tensor.nbytes for tensor in tensors.values())
            ) as stream:
                sums[name] = write_tensors(tensors, stream)
            files = [
                WeightFile(name=n, size=(partial / n).stat().st_size, xxh3=sums[n])
                for n in sorted(sums)
            ]
            if previous is not None:
                before = directory / version_name(previous.version)
                for each in files:
                    each.delta = _write_delta(before, partial, each, previous)
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # it would keep the disk full
        raise
    return WeightManifest(version=version, run_id=run_id, files=files, kind=kind)


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(file, target)


def _write_delta(
    before: Path, directory: Path, file: WeightFile, previous: WeightManifest
) -> WeightDelta | None:
    """Writes a file's delta from its namesake in `before`; returns None when no delta is needed or
    possible.
    """
    base = next(
        (each.xxh3 for each in previous.files if (each.name, each.size) == (file.name, file.size)),
        file.xxh3,
    )
    if base == file.xxh3 or not (before / file.name).is_file():
        return None
    target = directory / f"{file.name}.delta"
    size = write_delta(before / file.name, directory / file.name, target)
    return (
        None
        if size is None
        else WeightDelta(name=target.name, size=size, xxh3=checksum(target), base=base)
    )


class WeightBoard:
    """The newest weight version and the rollout nodes' reports, for the HTTP thread and the
    training loop.

    Removes the versions that an earlier attempt left in `directory`: they belong to another run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        self._closed = False
        self._unserved = False  # whether nobody can fetch or report any more
        self._lock = threading.Condition()
        self._latest: WeightManifest | None = None
        self._workers: dict[str, tuple[WorkerReport, float]] = {}
        self._complete = False  # whether all rollout nodes were there once
        self._excluded: set[str] = set()  # nodes that `wait_confirmed` does not wait for
        self._writing = threading.Lock()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.broadcaster: Broadcaster | None = None
        """Holds the tensors of versions that are announced without files."""

    def announce(self, manifest: WeightManifest) -> None:
        """Makes `manifest` the latest version and removes old ones from disk."""
        with self._lock:
            self._latest = manifest
            self._lock.notify_all()
        self._wake()
        self._remove_old()

    def _wake(self) -> None:
        """Wakes the calls that wait for a new version."""
        for event, loop in list(self._waiting.items()):
            with suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(event.set)

    def _remove_old(self) -> None:
        for old in sorted(self.directory.glob("v*"))[:-_KEEP]:
            if self._latest is not None and self._latest.directory:
                shutil.rmtree(
                    old, ignore_errors=True
                )  # the engine of a slow node may still read it here
            else:
                spares.discard(old)

    def withdraw(self, manifest: WeightManifest) -> WeightManifest:
        """Withdraws the broadcast of the latest version, which nodes then get as files; returns its
        manifest.
        """
        with self._lock:
            self._latest = withdrawn = (self._latest or manifest).model_copy(
                update={"broadcast": None}
            )
        self._wake()
        return withdrawn

    async def with_files(self, manifest: WeightManifest) -> WeightManifest:
        """Returns the manifest with files, after writing them if needed. Raises NotFound when the
        version is gone.
        """
        if manifest.files or self.broadcaster is None:
            return manifest
        return await asyncio.to_thread(self._write, self.broadcaster, manifest)

    def _write(self, broadcaster: "Broadcaster", manifest: WeightManifest) -> WeightManifest:
        with self._writing:
            latest = self._latest
            if latest is not None and latest.version == manifest.version and latest.files:
                return latest
            log.info(
                "writing the files of weights %d, because a node asks for them", manifest.version
            )
            written = broadcaster.write(manifest.version)
            with self._lock:
                if self._latest is not None and self._latest.version == written.version:
                    # The manifest keeps its broadcast: the nodes that take part must not see it
                    # withdrawn.
                    self._latest = self._latest.model_copy(update={"files": written.files})
            self._remove_old()
            return written

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Returns the verdict on an engine's checksums. Raises Conflict if they differ, NotFound if
        not broadcast.
        """
        if self.broadcaster is None:
            raise NotFound("no weights were broadcast", field="version", value=version)
        return await self.broadcaster.verify(version, sums)

    def sleep(self, timeout_s: float) -> None:
        """Tells the nodes to put their engines to sleep; waits for all. Raises PublishFailed after
        `timeout_s`.
        """
        start = time.monotonic()
        with self._lock:
            assert self._latest is not None, "engines sleep between two versions"
            self._latest = self._latest.model_copy(update={"asleep": True})
        self._wake()
        while True:
            self._check_served()
            with self._lock:
                alive = [
                    entry
                    for entry in self._workers.values()
                    if time.monotonic() - entry[1] < _SILENT_S
                ]
                # A report from before `start` may be out of date.
                awake = [report for report, at in alive if report.state != "asleep" or at < start]
                if alive and not awake:
                    return
                if time.monotonic() - start > timeout_s:
                    text = (
                        ", ".join(
                            f"{each.name} ({each.state}) {each.detail}".strip() for each in awake
                        )
                        or "no report"
                    )
                    raise PublishFailed(
                        f"after {timeout_s:.0f} s these engines have not released their memory for the update: {text}",
                        field="trainer.publish_timeout_s",
                        value=timeout_s,
                        remedy="look at the log of rollout-server",
                    )
                self._lock.wait(timeout=0.2)

    def close(self) -> None:
        """Ends the calls that wait for a new version, so that the HTTP server can end."""
        self._closed = True
        self._wake()

    def server_died(self) -> None:
        """Ends the calls that wait for nodes: these can no longer fetch versions and report."""
        with self._lock:
            self._unserved = True
            self._lock.notify_all()

    def _check_served(self) -> None:
        """Raises PublishFailed when the server of this board has died."""
        if self._unserved:
            reason = "the trainer's HTTP server, from which the rollout nodes get their weights, has died"
            raise PublishFailed(
                reason,
                field="trainer.port",
                remedy="see the log above, and start the trainer again",
            )

    def latest(self) -> WeightManifest | None:
        return self._latest

    async def latest_after(
        self, run_id: str, version: int, wait_s: float, asleep: bool = False
    ) -> WeightManifest:
        """Returns the latest version as soon as it differs from the arguments, or after `wait_s`
        seconds.

        Raises NotFound when there is none by then.
        """

        def changed() -> bool:
            latest = self._latest
            return latest is not None and (latest.run_id, latest.version, latest.asleep) != (
                run_id,
                version,
                asleep,
            )

        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not (changed() or self._closed):
                        await event.wait()
                        event.clear()
        finally:
            del self._waiting[event]
        if (latest := self._latest) is None:
            raise NotFound(
                "no weight version has been published yet",
                remedy="ask again; the trainer is starting",
            )
        return latest

    def file(self, version: int, name: str) -> Path:
        """Returns the path of one file of a version. Raises NotFound when there is no such version
        or file.
        """
        path = self.directory / version_name(version) / name
        try:
            found = "/" not in name and not name.startswith(".") and path.is_file()
        except OSError:  # a name that is too long for the file system
            found = False
        if not found:
            raise NotFound(
                "no such weight file",
                field="name",
                value=f"{version}/{name}",
                remedy="ask /weights/latest again",
            )
        return path

    def report(self, report: WorkerReport) -> None:
        """Records an agent's report on its engine."""
        with self._lock:
            previous = self._workers.get(report.name)
            now = time.monotonic()
            alive = {
                name: entry
                for name, entry in self._workers.items()
                if now - entry[1] < _FORGOTTEN_S
            }
            if len(alive) >= _MAX_WORKERS and report.name not in alive:
                raise TooLarge(
                    "too many workers report",
                    field="name",
                    value=report.name,
                    remedy=f"run at most {_MAX_WORKERS} workers",
                )
            self._workers = alive | {report.name: (report, now)}
            self._lock.notify_all()
        if report.state in ("stale", "failed") and (
            previous is None or previous[0].state != report.state
        ):
            log.warning(
                "%s is %s (weights %s): %s",
                report.name,
                report.state,
                report.version,
                report.detail,
            )

    def workers(self) -> list[WorkerReport]:
        """The reports of the workers that are alive."""
        now = time.monotonic()
        with self._lock:
            return [report for report, at in self._workers.values() if now - at < _SILENT_S]

    def num_nodes(self) -> int:
        """The number of rollout nodes in the job group, from the agents' reports; 1 before the
        first report.
        """
        with self._lock:
            return max((report.num_nodes for report, _ in self._workers.values()), default=1)

    def count(self, state: WorkerState) -> int:
        """The number of workers that are alive and in this state."""
        return sum(worker.state == state for worker in self.workers())

    def _silent(self) -> list[WorkerReport]:
        """The last reports of the workers that fell silent and are not excluded yet."""
        known = {worker.name for worker in self.workers()} | self._excluded
        with self._lock:
            return [report for name, (report, _) in self._workers.items() if name not in known]

    def _exclude(self, workers: list[WorkerReport]) -> list[WorkerReport]:
        self._complete = True
        self._excluded.update(worker.name for worker in workers)
        return workers

    def wait_confirmed(
        self, manifest: WeightManifest, timeout_s: float, say: Callable[[str], None]
    ) -> list[WorkerReport]:
        """Waits until the rollout nodes serve `manifest`; returns the ones that do not after
        `timeout_s` seconds.

        The first call waits for as many nodes as the agents report. Later calls do not wait for a
        node that was returned
        before until it has caught up by itself. A node that has fallen silent is returned at once:
        its engine may still run with old weights. Raises PublishFailed when no node serves the
        manifest.
        """
        start = said = time.monotonic()
        say_after_s = 10.0
        while True:
            self._check_served()
            workers = self.workers()
            current = {
                w.name
                for w in workers
                if (w.run_id, w.version, w.state) == (manifest.run_id, manifest.version, "ready")
            }
            self._excluded -= current
            missing = [w for w in workers if w.name not in current and w.name not in self._excluded]
            expected = max((w.num_nodes for w in workers), default=1)
            if current and not missing and (self._complete or len(workers) >= expected):
                return self._exclude(self._silent())
            now = time.monotonic()
            text = ", ".join(
                f"{w.name} ({w.state}, weights {w.version}) {w.detail}".strip() for w in missing
            )
            served = f"{len(current)} of {expected} rollout nodes serve weights {manifest.version}"
            waited = f"{served}; missing: {text or 'no report'}"
            if now - start > timeout_s:
                watchdog.deadline_passed(f"after {timeout_s:.0f} s {waited}")
                if not current:
                    raise PublishFailed(
                        f"after {timeout_s:.0f} s {waited}",
                        field="trainer.publish_timeout_s",
                        value=timeout_s,
                        remedy="look at the log of rollout-server",
                    )
                log.error(
                    "after %.0f s %s; training continues without them until they catch up",
                    timeout_s,
                    waited,
                )
                return self._exclude([*missing, *self._silent()])
            if now - said > say_after_s:
                say(f"waited {now - start:.0f} s so far: {waited}")
                said, say_after_s = now, min(60.0, 2 * say_after_s)
            with self._lock:
                self._lock.wait(timeout=0.2)


@dataclass
class Publisher:
    """Writes or broadcasts a version, announces it and waits until every rollout node serves it.
    One thread at a time.
    """

    board: WeightBoard
    static_files: list[Path]
    """Config and tokenizer files that make a version a complete model directory."""
    run_id: str
    timeout_s: float
    fence: Callable[[WorkerReport], None]
    """Stops traffic to a node that did not confirm within `timeout_s`."""
    say: Callable[[str], None]
    """Prints what the publisher waits for."""
    _: KW_ONLY
    published: Callable[[int, float], None] = lambda size, seconds: None
    """Called with the size in bytes and the duration in seconds of every version."""
    shared: bool = False
    """Whether nodes share this disk: the manifest then has the path of the files."""
    broadcaster: "Broadcaster | None" = None
    """Sends the tensors; when None, versions are written to files."""

    def sleep(self) -> None:
        """Returns when no engine holds GPU memory. Raises PublishFailed when one does not release
        it.
        """
        self.board.sleep(self.timeout_s)

    def wake(self) -> None:
        """Announces the newest version again, for engines that sleep. Raises PublishFailed when
        none serves it.
        """
        latest = self.board.latest()
        assert latest is not None, "engines sleep between two versions"
        manifest = latest.model_copy(update={"asleep": False})
        self.board.announce(manifest)
        for worker in self.board.wait_confirmed(manifest, self.timeout_s, self.say):
            self.fence(worker)

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the rollout nodes generate with exactly these weights. Raises PublishFailed
        when none does.
        """
        begin = time.monotonic()
        if self.broadcaster is None:
            directory, before = self.board.directory, self.board.latest()
            manifest = write_version(
                weights, self.static_files, directory, self.run_id, version, before
            )
            if self.shared:
                manifest.directory = str((directory / version_name(version)).absolute())
            self.board.announce(manifest)
            size = sum(file.size for file in manifest.files)
        else:
            manifest, size = self.broadcaster.publish(weights, version)
        for worker in self.board.wait_confirmed(manifest, self.timeout_s, self.say):
            self.fence(worker)
        if self.broadcaster is not None:
            self.broadcaster.close_if_broken()
        seconds = time.monotonic() - begin
        self.published(size, seconds)
        way = "broadcast" if manifest.broadcast else "shared" if manifest.directory else "http"
        rate = size / seconds / 1e6
        level = (
            logging.INFO if seconds >= 1 else logging.DEBUG
        )  # the log line of the step has the seconds anyway
        log.log(
            level,
            "weights %d: %.1f MB in %.2f s (%.0f MB/s) by %s",
            version,
            size / 1e6,
            seconds,
            rate,
            way,
        )
