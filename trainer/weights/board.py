"""The newest weight version, and what the rollout nodes report about it.

The trainer announces a version here; every rollout node's agent, the other end
(`services.rollout.weights.follow`), pulls it, loads it and reports. With `trainer.weight_sync`
distributed a version is broadcast into the engines (`broadcast`); its files are then written only
when a node asks for them.
"""

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from common.errors import NotFound, ServiceError
from common.process import logs, watchdog
from common.process.daemon_threads import in_daemon_thread
from common.process.progress import Progress, moved
from common.weights import recycled_files
from common.wire.schemas import (
    WeightChecksums,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
    WorkerState,
)
from trainer.weights.versions import version_name

log = logging.getLogger(__name__)
_BEHIND = "nodes_behind"
_KEEP = 3
"""Versions that stay on disk: a slow node may still download the one before the newest."""
_SILENT_S = 30.0
"""A worker that has not reported for this long counts as gone."""
_PERMISSION_S = 30.0
"""This long after an agent was last told that its engine may get requests, it has taken it out of
the router: it does so after 20 s."""
_QUIET_S = 8.0
"""A worker that has not reported for this long may hang; agents report every five seconds."""
_FORGOTTEN_S = 600.0


class PublishFailed(ServiceError):
    """No rollout node serves the new weights: going on would silently train on off-policy
    samples.
    """

    code = "publish_failed"


class VersionSource(Protocol):
    """Holds the tensors of a version that was announced without files."""

    def write(self, version: int, wrote: Callable[[], None]) -> WeightManifest:
        """Writes the files of the newest version, and calls `wrote` after every piece. Raises
        NotFound when it is not `version`.
        """

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        """Compares the weights that an engine has received with those that were sent."""


@dataclass
class _Files:
    """The files of a version that is written because a node asks for them."""

    run_id: str
    version: int
    pieces: int = 0
    written: "Future[WeightManifest]" = field(default_factory=Future)

    def are_of(self, manifest: WeightManifest) -> bool:
        # The runs of a process share a board, and each counts its versions from 1.
        return (self.run_id, self.version) == (manifest.run_id, manifest.version)

    def wrote(self) -> None:
        """Counts a piece."""
        self.pieces += 1
        moved()


@dataclass
class _Worker:
    """What an agent reported last, and when."""

    report: WorkerReport
    at: float

    @property
    def silence_s(self) -> float:
        """Seconds since the report."""
        return time.monotonic() - self.at

    def __str__(self) -> str:
        report = self.report
        state = f"{report.state}, weights {report.version}"
        if self.silence_s > _QUIET_S:
            quiet = f"no report for {self.silence_s:.0f} s, its agent may hang or be cut off"
            return f"{report.name} ({quiet}; last: {state})"
        return f"{report.name} ({state}) {report.detail}".strip()


class WeightBoard:
    """The newest weight version and the rollout nodes' reports, for the HTTP thread and the
    training loop.

    Removes the versions that an earlier attempt left in `directory`: they belong to another run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        self.source: VersionSource | None = None
        """Holds the tensors of versions that are announced without files."""
        self._lock = threading.Condition()
        self._latest: WeightManifest | None = None
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        """The calls that wait for a new version."""
        self._workers: dict[str, _Worker] = {}
        self._files: _Files | None = None
        self._closed = False
        self._unserved = False
        """Whether nobody can fetch or report any more."""
        self._complete = False
        """Whether all rollout nodes were there once."""
        self._confirmed: WeightManifest | None = None
        """The newest version with which the trainer goes on."""
        self._excluded: set[str] = set()
        """Nodes that `wait_confirmed` does not wait for."""
        self._may_list_until: dict[str, float] = {}
        """When the last permission of each node ends, if no other one follows."""

    def announce(self, manifest: WeightManifest) -> None:
        """Makes `manifest` the latest version and removes old ones from disk."""
        with self._lock:
            self._latest = manifest
            self._lock.notify_all()
        self._wake()
        self._remove_old()

    def _change_latest(self, **fields: object) -> WeightManifest:
        """Announces the latest version again, changed."""
        with self._lock:
            assert self._latest is not None, "it was announced"
            self._latest = self._latest.model_copy(update=fields)
        self._wake()
        return self._latest

    def _wake(self) -> None:
        """Wakes the calls that wait for a new version."""
        for event, loop in list(self._waiting.items()):
            with suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(event.set)

    def _remove_old(self) -> None:
        is_shared = self._latest is not None and self._latest.directory
        for old in sorted(self.directory.glob("v*"))[:-_KEEP]:
            if is_shared:
                # Not to be overwritten: the engine of a slow node may still read it here.
                shutil.rmtree(old, ignore_errors=True)
            else:
                recycled_files.discard(old)

    def withdraw(self) -> WeightManifest:
        """Withdraws the broadcast of the latest version, which nodes then get as files; returns its
        manifest.
        """
        return self._change_latest(broadcast=None)

    async def with_files(self, manifest: WeightManifest, wait_s: float) -> WeightManifest:
        """Returns the manifest with files, which are written first if needed; without them, and
        with the progress of writing, when they are not there in `wait_s` seconds. Raises NotFound
        when the version is gone.
        """
        if manifest.files or self.source is None:
            return manifest
        if self._files is None or not self._files.are_of(manifest):
            self._files = _Files(manifest.run_id, manifest.version)
            work = partial(self._write, self.source, self._files)
            self._files.written = in_daemon_thread(work, "weight-files")
        files = self._files
        # Several calls may wait: one that gives up does not end the writing.
        written = asyncio.shield(asyncio.wrap_future(files.written))
        done, _ = await asyncio.wait({written}, timeout=wait_s)
        if not done:
            written.cancel()
            return manifest.model_copy(update={"progress": files.pieces})
        if written.exception() is not None:
            self._files = None  # the next call tries again
        return written.result()

    def _write(self, source: VersionSource, files: _Files) -> WeightManifest:
        log.info("writing the files of weights %d, because a node asks for them", files.version)
        written = source.write(files.version, files.wrote)
        with self._lock:
            if self._latest is not None and files.are_of(self._latest):
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

    def sleep(self, limit_s: float) -> None:
        """Tells the nodes to put their engines to sleep; waits for all. Raises PublishFailed when
        no further engine does so for `limit_s` seconds.
        """
        start = time.monotonic()
        waits = Progress("the engines", limit_s)
        self._change_latest(asleep=True)
        while True:
            self._check_served()
            with self._lock:
                alive = self._alive()
                # A report from before `start` may be out of date.
                awake = [each for each in alive if each.report.state != "asleep" or each.at < start]
                if alive and not awake:
                    return
                waits.saw(len(alive) - len(awake))
                if waits.is_stuck:
                    raise PublishFailed(
                        f"after {waits.waited_s:.0f} s these engines have not released their "
                        f"memory for the update: {_listed(awake)}",
                        field="limits.fence_after_s",
                        value=limit_s,
                        remedy="look at the log of rollout-server",
                    )
                self._lock.wait(timeout=min(0.2, waits.pause_s))

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
            raise PublishFailed(
                "the trainer's HTTP server, from which the rollout nodes get their weights, has "
                "died",
                field="trainer.port",
                remedy="see the log above, and start the trainer again",
            )

    def latest(self) -> WeightManifest | None:
        return self._latest

    def latest_version(self) -> int | None:
        """Returns the number of the latest version; None before the first."""
        latest = self._latest
        return latest.version if latest else None

    async def latest_after(
        self, run_id: str, version: int, wait_s: float, asleep: bool = False
    ) -> WeightManifest:
        """Returns the latest version as soon as it differs from the arguments, or after `wait_s`
        seconds.

        Raises NotFound when there is none by then.
        """

        def is_known() -> bool:
            latest = self._latest
            known = (run_id, version, asleep)
            return latest is None or (latest.run_id, latest.version, latest.asleep) == known

        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while is_known() and not self._closed:
                        await event.wait()
                        event.clear()
        finally:
            del self._waiting[event]
        latest = self._latest
        if latest is None:
            raise NotFound(
                "no weight version has been published yet",
                remedy="ask again; a trainer publishes one when it starts, a tinker-server none",
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

    def report(self, report: WorkerReport) -> bool:
        """Records an agent's report on its engine. Returns whether the engine may get requests: it
        serves the latest version, or the one before while `wait_confirmed` waits for it.
        """
        with self._lock:
            used = [each for each in (self._latest, self._confirmed) if each is not None]
            # Before the first confirmation the trainer asks no engine.
            may_serve = self._confirmed is None or any(_has(report, each) for each in used)
            if may_serve:
                self._excluded.discard(report.name)  # from now on it is waited for
                self._may_list_until[report.name] = time.monotonic() + _PERMISSION_S
            previous = self._workers.get(report.name)
            remembered = {
                name: worker
                for name, worker in self._workers.items()
                if worker.silence_s < _FORGOTTEN_S
            }
            self._workers = remembered | {report.name: _Worker(report, time.monotonic())}
            self._lock.notify_all()
        is_new_state = previous is None or previous.report.state != report.state
        if report.state in ("stale", "failed") and is_new_state:
            log.warning(
                "%s is %s (weights %s): %s",
                report.name,
                report.state,
                report.version,
                report.detail,
            )
        return may_serve

    def _alive(self) -> list[_Worker]:
        with self._lock:
            return [worker for worker in self._workers.values() if worker.silence_s < _SILENT_S]

    def workers(self) -> list[WorkerReport]:
        """The reports of the workers that are alive."""
        return [worker.report for worker in self._alive()]

    def num_nodes(self) -> int:
        """The number of rollout nodes in the job group, from the agents' reports; 1 before the
        first report.
        """
        with self._lock:
            return max((each.report.num_nodes for each in self._workers.values()), default=1)

    def count(self, state: WorkerState) -> int:
        """The number of workers that are alive and in this state."""
        return sum(worker.state == state for worker in self.workers())

    def _go_on_without(self, manifest: WeightManifest) -> list[WorkerReport]:
        """Excludes the nodes that do not serve `manifest` and those that fell silent; returns their
        reports, once the permission of each has ended, or it serves `manifest`.
        """
        self._complete = True
        with self._lock:
            # At one moment: from now on a report of another version is answered with no.
            self._confirmed = manifest
            excluded = {
                name: worker
                for name, worker in self._workers.items()
                if name not in self._excluded
                and (worker.silence_s >= _SILENT_S or not _serves(worker.report, manifest))
            }
            self._excluded.update(excluded)
        for name, worker in excluded.items():
            if worker.silence_s >= _SILENT_S:
                log.error(
                    "%s: no report for %.0f s: its agent hangs, is cut off or is gone; it gets no "
                    "requests, and training continues without it until it reports",
                    name,
                    worker.silence_s,
                )
        # Until then an agent may list its engine. That it was told otherwise does not say that it
        # knows: the answer to its report may be lost.
        with self._lock:
            while any(map(self._may_list, excluded)):
                self._lock.wait(timeout=0.2)
            return [excluded[name].report for name in excluded if name in self._excluded]

    def _may_list(self, name: str) -> bool:
        """Whether the agent of a node that was excluded may still list its engine."""
        return name in self._excluded and time.monotonic() < self._may_list_until.get(name, 0.0)

    def wait_confirmed(
        self,
        manifest: WeightManifest,
        limit_s: float,
        say: Callable[[str], None],
    ) -> list[WorkerReport]:
        """Waits until the rollout nodes serve `manifest`; returns those that do not and have made
        no progress for `limit_s` seconds. A node may take as long as it makes progress.

        The first call waits for as many nodes as the agents report. Later calls do not wait for a
        node that was returned before until it has caught up by itself. A node that has fallen
        silent is returned at once: its engine may still run with old weights. Raises PublishFailed
        when no node serves the manifest.
        """
        arrivals = Progress("the rollout nodes", limit_s)
        nodes: dict[str, _NodeProgress] = {}
        told = time.monotonic()
        tell_after_s = 10.0
        while True:
            self._check_served()
            alive = {worker.report.name: worker for worker in self._alive()}
            serving = {name for name, each in alive.items() if _serves(each.report, manifest)}
            others = {name: worker for name, worker in alive.items() if name not in serving}
            missing = {name: each for name, each in others.items() if name not in self._excluded}
            # The number of engines of the job group, by the report of any: each of them reports.
            expected = max(
                (each.report.num_nodes // each.report.nodes_per_engine for each in alive.values()),
                default=1,
            )
            all_there = self._complete or len(alive) >= expected
            if serving and not missing and all_there:
                # Silent nodes may still generate with old weights.
                return self._go_on_without(manifest)

            arrivals.saw(len(alive))
            for name, worker in others.items():
                nodes.setdefault(name, _NodeProgress(worker.report, limit_s)).saw(worker.report)
            # Without any node that serves, one that was given up before may still get there.
            awaited = missing if serving else others
            waited = (
                f"{len(serving)} of {expected} rollout nodes serve weights {manifest.version}; "
                f"missing: {_listed(awaited.values())}"
            )
            is_stuck = all(nodes[name].waits.is_stuck for name in awaited)
            if is_stuck and (arrivals.is_stuck or (awaited and all_there)):
                watchdog.deadline_passed(f"no progress for {limit_s:g} s: {waited}")
                if not serving:
                    raise PublishFailed(
                        f"no progress for {limit_s:g} s: {waited}",
                        code=_BEHIND,
                        field="limits.fence_after_s",
                        value=limit_s,
                        remedy="look at the log of rollout-server",
                    )
                log.error(
                    "no progress for %g s (limits.fence_after_s): %s; training continues without "
                    "them until they catch up",
                    limit_s,
                    waited,
                    extra=logs.event(_BEHIND),
                )
                return self._go_on_without(manifest)

            now = time.monotonic()
            if now - told > tell_after_s:
                say(f"waited {arrivals.waited_s:.0f} s so far: {waited}")
                told = now
                tell_after_s = min(60.0, 2 * tell_after_s)
            with self._lock:
                self._lock.wait(timeout=min(0.2, arrivals.pause_s))


class _NodeProgress:
    """A rollout node on its way to a version."""

    def __init__(self, worker: WorkerReport, limit_s: float) -> None:
        self.waits = Progress(worker.name, limit_s)
        self._last = worker.progress
        self._sum = 0

    def saw(self, worker: WorkerReport) -> None:
        """Records a report; an agent that was restarted counts from 0 again."""
        self._sum += max(0, worker.progress - self._last)
        self._last = worker.progress
        self.waits.saw(self._sum)


def _serves(worker: WorkerReport, manifest: WeightManifest) -> bool:
    """Whether a worker generates with exactly this version."""
    return _has(worker, manifest) and worker.state == "ready"


def _has(worker: WorkerReport, manifest: WeightManifest) -> bool:
    """Whether a worker's engine holds exactly this version."""
    return worker.run_id == manifest.run_id and worker.version == manifest.version


def _listed(workers: Iterable[_Worker]) -> str:
    return ", ".join(map(str, workers)) or "no report"
