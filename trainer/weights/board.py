"""The newest weight version, and what the rollout nodes report about it.

The trainer announces a version here; every rollout node's agent pulls it (`services/rollout/weights`
is the other end), loads it and reports. With `trainer.weight_sync` distributed a version is
broadcast into the engines (`broadcast.py`); its files are then written only when a node asks for
them.
"""

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from common.errors import NotFound, ServiceError, TooLarge
from common.process import watchdog
from common.weights import spares
from common.wire.schemas import (
    WeightChecksums,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
    WorkerState,
)
from trainer.weights.versions import version_name

log = logging.getLogger(__name__)
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


class VersionSource(Protocol):
    """Holds the tensors of a version that was announced without files."""

    def write(self, version: int) -> WeightManifest:
        """Writes the files of the newest version. Raises NotFound when it is not `version`."""

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Compares the weights that an engine has received with those that were sent."""


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
        self.source: VersionSource | None = None
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
                spares.retire(old)

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
        if manifest.files or self.source is None:
            return manifest
        return await asyncio.to_thread(self._write, self.source, manifest)

    def _write(self, source: VersionSource, manifest: WeightManifest) -> WeightManifest:
        with self._writing:
            latest = self._latest
            if latest is not None and latest.version == manifest.version and latest.files:
                return latest
            log.info(
                "writing the files of weights %d, because a node asks for them", manifest.version
            )
            written = source.write(manifest.version)
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
        if self.source is None:
            raise NotFound("no weights were broadcast", field="version", value=version)
        return await self.source.verify(version, sums)

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
