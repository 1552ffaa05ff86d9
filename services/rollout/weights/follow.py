"""Keeps the engine on the trainer's newest weights: polls, receives or downloads, loads and
confirms them. The other end is `trainer.weights`: `publisher` announces the versions, `broadcast`
and `transfer` send them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from common.clients.base import Unreachable
from common.clients.unreachable import problem_of
from common.errors import ServiceError
from common.process import logs
from common.process.futures import forgettable
from common.process.metrics import Metrics
from common.process.progress import Progress, bounded
from common.settings.config import Config
from common.wire.schemas import WeightManifest
from services.rollout.engine_client import EngineClient, adapters_kept, released_memory
from services.rollout.engine_nodes import EngineNodes
from services.rollout.loops import RateLimitedWarnings, wait_event
from services.rollout.state import NodeState
from services.rollout.supervision import SupervisedProcess
from services.rollout.weights.receive import BroadcastReceiver
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import TrainerClient, WeightId, WeightsGone

log = logging.getLogger(__name__)
_POLL_S = 20.0
# Shorter when engine and trainer share GPUs, because a restarted trainer needs them soon.
_SHARED_GPU_POLL_S = 5.0
# Consecutive interrupted downloads, each right after a response from the trainer, that make the
# node stale.
_LOST_BEFORE_STALE = 3
_SAY_AFTER_S = 0.5
_ASK_ENGINE_S = 5.0
# One answer about files that are being written.
_FILES_S = 30.0


class WeightFollower:
    """Updates the engine to the newest weights, records the progress in `state`, and calls
    `changed`.

    It uses the client `api` and restarts the process `engine` after repeated failures. `nodes` are
    the others of an engine that is larger than this node: each loads from its own disk.
    """

    def __init__(
        self,
        config: Config,
        state: NodeState,
        store: WeightStore,
        *,
        trainer: TrainerClient,
        api: EngineClient,
        engine: SupervisedProcess,
        changed: Callable[[], None],
        name: str,
        metrics: Metrics,
        nodes: EngineNodes,
    ) -> None:
        self._nodes = nodes
        self._stuck_after_s = config.rollout.stuck_after_s
        self._adapters_kept = adapters_kept(config)
        self._state = state
        self._store = store
        self._trainer = trainer
        self._api = api
        self._engine = engine
        self._changed = changed
        self._name = name
        self._receiver = BroadcastReceiver(name, api, trainer)

        self.newest: tuple[WeightManifest, Path] | None = None
        """The newest verified weights and their directory, used to start an engine."""
        self.refused: WeightId | None = None
        """The newest weights that an engine did not load: none starts with them, as a start
        compares files with nothing, and would accept what a load refuses."""
        self.is_trainer_silent = False
        """Whether a trainer that has never reached this node may run: something keeps it from
        answering."""
        self._process_id = secrets.token_hex(4)
        self._failed_broadcasts = 0
        # Interrupted downloads in a row.
        self._lost_downloads = 0
        self._loading: asyncio.Task[None] | None = None
        # Whether the engine may hold part of a version.
        self._partial = False

        # The kinds of memory that the engine releases for the trainer; none: it has GPUs of its
        # own.
        self._shared_memory = released_memory(config)
        self._poll_s = _SHARED_GPU_POLL_S if self._shared_memory else _POLL_S
        self._gpus_free = asyncio.Event()
        self._waits_for_gpus = False
        self._wake = asyncio.Event()
        self._warnings = RateLimitedWarnings()

        self._updates = metrics.counter(
            "rollout_weight_updates_total", "Attempts to get to a new weight version", ["result"]
        )
        self._seconds = metrics.histogram(
            "rollout_weight_update_duration_seconds",
            "Seconds of weight updates by stage",
            ["stage"],
        )

    @property
    def incarnation(self) -> str:
        """Changes with every start of node or engine and every broadcast that did not last, which
        invalidates earlier groups.
        """
        return f"{self._process_id}-{self._engine.starts}-{self._failed_broadcasts}"

    @property
    def doing(self) -> str:
        """What the node does to get to the wanted version; empty when it does nothing."""
        if not self._state.updating:
            return ""
        return "the engine loads them" if self._loading else str(self._store.download)

    def engine_up(self) -> None:
        """Continues loading once the engine is healthy."""
        self._wake.set()

    def engine_down(self) -> None:
        """Cancels a load into an engine that has ended."""
        self._receiver.reset()
        self._partial = False
        self._api.asleep = []
        self._api.is_paused = False
        self._api.confirmed = None
        if self._loading is not None:
            self._loading.cancel()

    async def fetch_first(self) -> None:
        """Tries once to fetch weights, so that the engine starts with the trainer's weights if
        there are any.
        """
        if self._shared_memory:
            return
        manifest = await self._ask(wait_s=0, deadline_s=1)
        if manifest is not None:
            await self._adopt(manifest)

    async def wait_for_gpus(self) -> None:
        """Waits until the engine may start: returns at once, unless the trainer currently has the
        shared GPUs.
        """
        self._waits_for_gpus = True
        try:
            if self._shared_memory:
                await self._gpus_free.wait()
        finally:
            self._waits_for_gpus = False

    async def run(self) -> None:
        """Follows the trainer's versions until cancelled."""
        deadline_s = self._poll_s + (3 if self._shared_memory else 10)
        while True:
            manifest = await self._ask(self._poll_s, deadline_s)
            # With shared GPUs, a trainer that does not answer may be starting and need them.
            if self._shared_memory and (manifest is None or manifest.asleep):
                await self._release_memory()
                if manifest is None or not self._state.asleep:
                    await asyncio.sleep(0.2)
                continue

            is_served = manifest is not None and WeightId.of(manifest) == self._state.serves
            if manifest is None or (is_served and not self._api.asleep):
                await asyncio.sleep(0.2)
                continue

            await self._adopt(manifest)
            if self.newest is not None:
                self._gpus_free.set()
            if self._state.serves == self._state.wanted:
                continue
            # It failed, or the engine is down: it tries again later, or when the engine is up.
            self._wake.clear()
            pause = max(0.2, self._state.backoff_s) if self._engine.up else 2.0
            await wait_event(self._wake, pause)

    async def watch(self) -> None:
        """Takes the engine out of traffic when it serves other weights than it has loaded last;
        `run` then loads the newest again.
        """
        while True:
            await asyncio.sleep(_ASK_ENGINE_S)
            try:
                label = await self._api.strayed_to()
            except ServiceError:
                continue  # it has ended or hangs, which its supervision notices
            if label is not None:
                reason = f"the engine has gone over to weights {label}, as an earlier call asked"
                log.error("this node receives no traffic: %s", reason)
                self._state.strayed(reason)
                # The broadcast of these weights is over: it gets them as files.
                self._failed_broadcasts += 1
                self._changed()

    async def _ask(self, wait_s: float, deadline_s: float) -> WeightManifest | None:
        """Returns the trainer's newest version; None when it has none or does not answer."""
        try:
            return await self._trainer.latest(
                self._state.serves, wait_s, deadline_s, asleep=self._state.asleep
            )
        except Unreachable as error:
            self.is_trainer_silent = problem_of(error) not in ("refused", "unknown_name")
            self._warnings.warn(
                "unreachable",
                f"serving continues without the trainer: {error}",
                self._trainer.severity,
            )
        except ServiceError as error:
            self._warnings.warn(
                "refused", f"the trainer's answer cannot be used, serving continues: {error}"
            )
        return None

    async def _release_memory(self) -> None:
        """Makes the engine release its memory, because the trainer computes, or a new trainer will
        need the GPUs.

        An engine stays awake only while a trainer says so, whichever of the two is killed. A
        starting engine is put to sleep when it answers. An engine that does not release its memory
        is restarted.
        """
        self._gpus_free.clear()
        was_asleep = self._state.asleep
        start = self._engine.starts
        if self._engine.up and not self._api.asleep:
            try:
                await self._api.sleep(self._shared_memory, self._stuck_after_s)
            except ServiceError as error:
                if self._is_still_up(start):
                    self._engine.restart(f"it did not release its memory: {error}")
                return

        engine_sleeps = self._engine.up and bool(self._api.asleep)
        self._state.asleep = self._waits_for_gpus or engine_sleeps
        if self._state.asleep != was_asleep:
            self._changed()

    def _is_still_up(self, start: int) -> bool:
        """Whether the engine is healthy and was not restarted since its start number `start`."""
        return self._engine.up and self._engine.starts == start

    async def _adopt(self, manifest: WeightManifest) -> None:
        """Tries once to update to this version and records the result in the state.

        All calls and log lines about a version, of all nodes, engines and the trainer, share one
        request id.
        """
        with logs.request(f"{manifest.run_id}-v{manifest.version}", manifest.run_id):
            await self._update(manifest)

    async def _update(self, manifest: WeightManifest) -> None:
        wanted = WeightId.of(manifest)
        self._state.wanted = wanted
        self._state.updating = True
        self._state.asleep = False
        # Said only of an update that takes long: the trainer hears at once that it is done.
        say = asyncio.get_running_loop().call_later(_SAY_AFTER_S, self._changed)

        stage = "download"
        try:
            if await self._receive(wanted, manifest):
                return

            begin = time.monotonic()
            if not manifest.files:
                manifest = await self._with_files()
                wanted = WeightId.of(manifest)
                self._state.wanted = wanted
            self._nodes.want(manifest)  # so that the other nodes fetch at the same time
            path = await self._store.fetch(manifest)
            self._seconds.labels(stage).observe(time.monotonic() - begin)
            self.newest = (manifest, path)
            self._lost_downloads = 0
            if self._engine.up:
                await self._nodes.hold(manifest, path)

            stage = "load"
            if self._engine.up and await self._into_engine("load", self.load(manifest, path)):
                self._partial = False
                self._update_done(wanted)
                log.info("the engine serves %s", wanted)
            else:
                self._state.updating = False  # the next engine starts with these weights
        except (httpx.HTTPError, WeightsGone) as error:
            # The next poll shows whether the trainer ended or has a newer version.
            self._lost_downloads += 1
            if self._lost_downloads >= _LOST_BEFORE_STALE:
                self._failed(wanted, stage, error)
            else:
                self._state.updating = False
                said = f"{type(error).__name__} {error}"
                log.warning("download of weights %d was cut short: %s", wanted.version, said)
        except (ServiceError, OSError) as error:
            self._failed(wanted, stage, error)
        finally:
            say.cancel()
            self._changed()

    def _update_done(self, wanted: WeightId) -> None:
        self._state.update_done(wanted)
        self._updates.labels("done").inc()

    async def _with_files(self) -> WeightManifest:
        """Returns the newest version with its files, which the trainer writes on demand."""
        waits = Progress(
            "the files of a version that the trainer writes",
            self._stuck_after_s,
            unit="MiB",
            field="rollout.stuck_after_s",
            remedy="look at the log of ppo-trainer",
        )
        while True:
            manifest = await self._trainer.latest(
                held=None, wait_s=waits.pause_s, deadline_s=_FILES_S, files=True
            )
            if manifest is None:
                raise WeightsGone("the trainer has no files of these weights")
            if manifest.files:
                return manifest
            waits.saw(manifest.progress)
            waits.check()

    async def _receive(self, wanted: WeightId, manifest: WeightManifest) -> bool:
        """Receives this version by broadcast if there is one; returns whether the engine serves it.

        After a failure the node loads the files instead; until then the engine is stale, as it may
        hold part of a version.
        """
        broadcast = manifest.broadcast
        if broadcast is None or not self._engine.up:
            return False
        if broadcast.incarnations.get(self._name) != self.incarnation:
            log.info(
                "this node is not in the broadcast of weights %d: it downloads the files",
                wanted.version,
            )
            return False

        start = self._engine.starts
        try:
            work = self._receiver.receive(manifest, broadcast)
            if await self._into_engine("broadcast", work):
                self._update_done(wanted)
                return True
        except (ServiceError, httpx.HTTPError, OSError, TimeoutError) as error:
            self._partial = True
            self._failed(wanted, "broadcast", error)

        self._failed_broadcasts += 1  # another incarnation: the next group is a new one
        self._changed()
        if self._is_still_up(start) and not await self._receiver.abandon(broadcast):
            self._engine.restart(
                f"the engine is stuck in the broadcast of weights {wanted.version}"
            )
        self._state.updating = True
        return False

    async def load(self, manifest: WeightManifest, path: Path) -> None:
        """Loads this version into the engine. Raises ServiceError when the engine refuses."""
        await self._api.load_version(
            manifest,
            path,
            keep=self._adapters_kept,
            timeout_s=self._stuck_after_s,
            whole=not self._partial,
        )

    async def _into_engine(self, stage: str, work: Coroutine[Any, Any, None]) -> bool:
        """Does `work` with the engine; returns False when the engine has ended meanwhile. Raises
        Stuck when the engine makes no progress.
        """
        start = self._engine.starts
        begin = time.monotonic()
        waits = Progress(
            f"the engine to take weights ({stage})",
            self._stuck_after_s,
            unit="steps",
            field="rollout.stuck_after_s",
            remedy="look at the log of the engine",
        )
        first: int | None = None

        def progress() -> int:
            # Counted from the first look on: most loads are over before, and a look at the engine's
            # processes takes longer than the load of a small model.
            nonlocal first
            work = self._engine.work()
            if first is None:
                first = work
            return work - first + self._receiver.received

        # An engine that has ended meanwhile makes its error one that nobody asks for.
        self._loading = forgettable(asyncio.create_task(bounded(work, waits, progress)))
        try:
            await asyncio.wait({self._loading})
            if self._loading.cancelled() or not self._is_still_up(start):
                return False
            self._loading.result()
        finally:
            self._loading.cancel()
            self._loading = None
        self._seconds.labels(stage).observe(time.monotonic() - begin)
        return True

    def _failed(self, wanted: WeightId, stage: str, error: Exception) -> None:
        reason = f"{stage} of weights {wanted.version} failed: {type(error).__name__} {error}"
        self._updates.labels("failed").inc()
        self._state.update_failed(reason, engine_failed=stage == "load")
        log.error(
            "this node is stale and receives no traffic: %s",
            reason,
            extra=logs.event("node_stale", problem=problem_of(error)),
        )
        if stage == "load":
            self.refused = wanted
        # An engine that went on would serve a mixture of two versions, or nothing at all.
        if stage == "load" and (self._partial or self._api.asleep):
            self._engine.restart(f"it may hold a part of a version; {reason}")
        elif self._state.must_restart:
            self._engine.restart(
                f"restarted after {self._state.failed_loads} failed weight updates; {reason}"
            )
