"""Weight versions: written by the trainer, pulled by every rollout node's agent, confirmed by each.

A version is a complete Hugging Face directory `v000012/`; its manifest (sizes and SHA-256) is made last. A version is
the optimiser step that made it. `WeightBoard` keeps what the trainer's HTTP app serves; `Publisher` writes a version,
announces it and waits until every rollout node has confirmed it. A node that does not is fenced from traffic.
"""

import asyncio
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from common.errors import NotFound, ServiceError
from common.schemas import WeightFile, WeightManifest, WorkerReport

log = logging.getLogger(__name__)
Weights = Iterable[tuple[str, Tensor]]
"""Tensors by their Hugging Face names, each once."""
_KEEP = 3
"""Versions kept on disk: a slow node may still be downloading the one before the newest."""
_SILENT_S = 30.0
"""A worker that did not report for this long is counted as gone."""


class PublishFailed(ServiceError):
    """No rollout node serves the new weights: generating would be off-policy without anybody knowing."""

    code = "publish_failed"


def version_name(version: int) -> str:
    """Name of a version's directory."""
    return f"v{version:06d}"


def write_version(weights: Weights, static_files: list[Path], directory: Path, run_id: str, version: int) -> WeightManifest:
    """Writes `directory/v000012/` and returns its manifest; atomic, so a directory of that name is complete."""
    target = directory / version_name(version)
    partial = target.with_suffix(".partial")
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in static_files:
        shutil.copyfile(file, partial / file.name)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    files = [WeightFile(name=file.name, size=file.stat().st_size, sha256=_sha256(file)) for file in sorted(partial.iterdir())]
    partial.rename(target)
    return WeightManifest(version=version, run_id=run_id, files=files)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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

    def announce(self, manifest: WeightManifest) -> None:
        """Makes `manifest` the latest version and removes old ones from disk."""
        with self._lock:
            self._latest = manifest
            self._lock.notify_all()
        for old in sorted(self.directory.glob("v*"))[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Ends the calls that wait for a new version, so that the HTTP server can end."""
        self._closed = True

    def latest(self) -> WeightManifest | None:
        return self._latest

    async def latest_after(self, run_id: str, version: int, wait_s: float) -> WeightManifest:
        """The latest version, as soon as it differs from (run_id, version), at the latest after `wait_s` seconds.

        Raises NotFound when there is none by then.
        """
        limit = time.monotonic() + wait_s
        while True:
            latest = self._latest
            if latest is not None and (latest.run_id, latest.version) != (run_id, version):
                return latest
            if time.monotonic() >= limit or self._closed:
                break
            await asyncio.sleep(0.02)
        if latest is None:
            raise NotFound("no weight version was published yet", remedy="ask again; the trainer is starting")
        return latest

    def file(self, version: int, name: str) -> Path:
        """Path of one file of a version. Raises NotFound when the version or the file is not there (any more)."""
        path = self.directory / version_name(version) / name
        if "/" in name or name.startswith(".") or not path.is_file():
            raise NotFound("no such weight file", field="name", value=f"{version}/{name}", remedy="ask /weights/latest again")
        return path

    def report(self, report: WorkerReport) -> None:
        """What an agent says of its engine."""
        with self._lock:
            previous = self._workers.get(report.name)
            self._workers[report.name] = (report, time.monotonic())
            self._lock.notify_all()
        if report.state in ("stale", "failed") and (previous is None or previous[0].state != report.state):
            log.warning("%s is %s (weights %s): %s", report.name, report.state, report.version, report.detail)

    def workers(self) -> list[WorkerReport]:
        """The reports of the workers that are alive."""
        now = time.monotonic()
        with self._lock:
            return [report for report, at in self._workers.values() if now - at < _SILENT_S]

    def wait_confirmed(self, manifest: WeightManifest, timeout_s: float, say: Callable[[str], None]) -> list[WorkerReport]:
        """Waits until the rollout nodes serve `manifest`; returns the ones that do not after `timeout_s` seconds.

        The first time it waits for as many nodes as the agents say there are. After that a node that has fallen silent,
        or was returned before, is not waited for until it has caught up by itself. Raises PublishFailed when nobody
        serves the manifest.
        """
        start = said = time.monotonic()
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
                return []
            now = time.monotonic()
            text = ", ".join(f"{w.name} ({w.state}, weights {w.version}) {w.detail}".strip() for w in awaited)
            served = f"{len(current)} of {expected} rollout nodes serve weights {manifest.version}"
            waited = f"{served}; missing: {text or 'no report'}"
            if now - start > timeout_s:
                if not current:
                    raise PublishFailed(f"after {timeout_s:.0f} s {waited}", remedy="look at the log of rollout-server")
                log.error("after %.0f s %s; training goes on without them until they catch up", timeout_s, waited)
                self._met = True
                self._left_behind.update(w.name for w in awaited)
                return awaited
            if now - said > 10:
                say(f"waiting since {now - start:.0f} s: {waited}")
                said = now
            with self._lock:
                self._lock.wait(timeout=0.2)


class Fence(Protocol):
    """Takes a worker out of traffic."""

    def __call__(self, worker: WorkerReport) -> None: ...


class Publisher:
    """Publishes the learner's weights and waits for every rollout node.

    Args:
        board: where versions are announced and confirmed.
        static_files: config and tokenizer files that make a version a complete model directory.
        run_id: of this training run.
        timeout_s: for all nodes to confirm.
        fence: called for a node that did not confirm in time.
        say: tells a person what is awaited.
    """

    def __init__(
        self,
        board: WeightBoard,
        static_files: list[Path],
        run_id: str,
        timeout_s: float,
        fence: Fence,
        say: Callable[[str], None],
    ) -> None:
        self._board, self._static_files, self.run_id = board, static_files, run_id
        self._timeout_s, self._fence, self._say = timeout_s, fence, say

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the rollout nodes generate with exactly these weights. Raises PublishFailed when none does."""
        manifest = write_version(weights, self._static_files, self._board.directory, self.run_id, version)
        self._board.announce(manifest)
        for worker in self._board.wait_confirmed(manifest, self._timeout_s, self._say):
            self._fence(worker)


def write_static_files(model: Any, tokenizer: Any, directory: Path) -> list[Path]:
    """Config, generation config and tokenizer, written once; returns their paths."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sorted(path for path in directory.iterdir() if path.is_file())
