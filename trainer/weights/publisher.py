"""Publishes a version to the rollout nodes and waits until each of them serves it.

The nodes' end is `services.rollout.weights`: `follow` takes a version, `store` fetches its files.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from common.process import logs
from common.wire.schemas import WeightManifest, WorkerReport
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.versions import Weights, version_name, write_version

log = logging.getLogger(__name__)


@dataclass
class Publisher:
    """Writes or broadcasts a version, announces it and waits until every rollout node serves it.
    One thread at a time.
    """

    board: WeightBoard
    static_files: list[Path]
    """Config and tokenizer files that make a version a complete model directory."""
    run_id: str
    limit_s: float
    fence: Callable[[WorkerReport], None]
    """Stops traffic to a node that made no progress for `limit_s` seconds."""
    say: Callable[[str], None]
    """Prints what the publisher waits for."""
    _: KW_ONLY
    published: Callable[[int, float], None] = lambda size, seconds: None
    """Called with the size in bytes and the duration in seconds of every version."""
    shared: bool = False
    """Whether nodes share this disk: the manifest then has the path of the files."""
    has_deltas: bool = True
    """Whether nodes get what has changed; else they read whole files."""
    broadcaster: Broadcaster | None = None
    """Sends the tensors; when None, versions are written to files."""

    def sleep(self) -> None:
        """Returns when no engine holds GPU memory. Raises PublishFailed when one does not release
        it.
        """
        self.board.sleep(self.limit_s)

    def wake(self) -> None:
        """Announces the newest version again, for engines that sleep. Raises PublishFailed when
        none serves it.
        """
        latest = self.board.latest()
        assert latest is not None, "engines sleep between two versions"
        manifest = latest.model_copy(update={"asleep": False})
        self.board.announce(manifest)
        self._wait_confirmed(manifest)

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the rollout nodes generate with exactly these weights.

        Raises PublishFailed when none does, and ConfigError for an engine that no broadcast can
        reach.
        """
        # The agents use the same id (`services.rollout.weights.follow`).
        with logs.request(f"{self.run_id}-v{version}", self.run_id):
            begin = time.monotonic()
            if self.broadcaster is None:
                directory = self.board.directory
                manifest = write_version(
                    weights,
                    self.static_files,
                    directory,
                    run_id=self.run_id,
                    version=version,
                    previous=self.board.latest() if self.has_deltas else None,
                )
                if self.shared:
                    manifest.directory = str((directory / version_name(version)).absolute())
                self.board.announce(manifest)
                size = sum(file.size for file in manifest.files)
            else:
                manifest, size = self.broadcaster.publish(weights, version)
            self._wait_confirmed(manifest)
            if self.broadcaster is not None:
                self.broadcaster.refuse_other_nccl()  # of engines that have reported only now
                self.broadcaster.close_if_broken()

            seconds = time.monotonic() - begin
            self.published(size, seconds)
            if manifest.broadcast:
                transport = "broadcast"
            else:
                transport = "shared" if manifest.directory else "http"
            log.log(
                # A short one is in the log line of the step anyway.
                logging.INFO if seconds >= 1 else logging.DEBUG,
                "weights %d: %.1f MB in %.2f s (%.0f MB/s) by %s",
                version,
                size / 1e6,
                seconds,
                size / max(seconds, 1e-6) / 1e6,
                transport,
            )

    def _wait_confirmed(self, manifest: WeightManifest) -> None:
        """Waits until the nodes serve a version; stops the traffic to those that do not."""
        for worker in self.board.wait_confirmed(manifest, self.limit_s, self.say):
            self.fence(worker)
