"""The agent of a rollout node: keeps its engine running, updates its weights, and registers it with
the router.

Its loops share one `NodeState`: supervision of the engine, weight updates, registration, and
reports to the trainer. On node 0 a further loop supervises the router.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from common.clients.rollout import BASE_VERSION
from common.errors import ServiceError, shorten
from common.process import progress
from common.process.metrics import Metrics
from common.process.topology import ROLLOUT, TRAINER, Topology, assigned_gpus
from common.settings.config import Config
from common.settings.sections import RolloutSection
from common.wire.schemas import MAX_DETAIL_CHARS, EngineLibraries, WeightManifest, WorkerReport
from services.http.app import listen
from services.rollout.engine_client import (
    EngineClient,
    engine_command,
    engine_env,
    engine_libraries,
)
from services.rollout.generation import GenerationProbe
from services.rollout.loops import RateLimitedWarnings, stop, wait_event
from services.rollout.router import RouterClient, router_command, router_env
from services.rollout.state import NodeState
from services.rollout.supervision import SupervisedProcess, Timing
from services.rollout.weights.follow import WeightFollower
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import TrainerClient, WeightId

log = logging.getLogger(__name__)
_HEARTBEAT_S = 5.0
_REPORTS = 8
"""Reports of progress, at least, within the time after which the trainer fences a silent node."""
_RECONCILE_S = 1.0
_Loop = Coroutine[Any, Any, None]


class AgentStatus(BaseModel):
    """Answer of `GET /status`."""

    report: WorkerReport
    wanted: int | None
    """The trainer's newest version."""
    registered: bool
    """Whether the router lists the engine as healthy."""
    engine_pid: int | None
    """Id of the process group."""
    engine_starts: int
    router_pid: int | None
    """Id of the process group; set only on node 0."""


class Agent:
    """Runs a rollout node, and speaks for it to trainer and router. An error in one of its loops
    ends this process; `fatal` then holds it.
    """

    def __init__(self, config: Config, topology: Topology, metrics: Metrics) -> None:
        rollout = config.rollout
        self.name = topology.own_name(ROLLOUT)
        self.fatal: ServiceError | None = None
        """Why the node cannot continue."""
        self._config = config
        self._topology = topology
        self._heartbeat_s = min(_HEARTBEAT_S, config.limits.fence_after_s / _REPORTS)
        self._warnings = RateLimitedWarnings()
        self._wake_report = asyncio.Event()
        self._trainer = TrainerClient("trainer", topology.url(TRAINER, config.trainer.port))
        directory = config.state_dir / "rollout" / self.name / "weights"
        self._store = WeightStore(directory, self._trainer)
        self._starts = metrics.counter(
            "rollout_engine_starts_total", "How often the engine was started"
        )
        self.url = topology.url(ROLLOUT, rollout.engine_port, topology.node_rank)
        self._engine_api = EngineClient("engine", self.url)
        self.engine = SupervisedProcess(
            "engine",
            self._launch_engine,
            GenerationProbe(
                self._engine_api, rollout.stuck_after_s, lambda: self._engine_api.is_paused
            ),
            env=engine_env(config) | topology.loopback_env() | topology.proxy_env(os.environ),
            log_file=config.state_dir / "logs" / f"{self.name}.engine.log",
            timing=Timing(stuck_s=rollout.stuck_after_s, hang_s=rollout.hang_timeout_s),
            on_up=self._engine_up,
            on_down=self._engine_down,
            stuck_field="rollout.stuck_after_s",
        )
        self.state = NodeState()
        self._libraries: EngineLibraries | None = None
        self._registered = False
        self._started_with: tuple[WeightManifest, Path] | None = None
        """The weights that the engine was started with; None for the base model."""
        self._wake_router = asyncio.Event()
        self._router_api = RouterClient("router", topology.url(ROLLOUT, rollout.router_port))

        self.router = self._supervised_router() if topology.node_rank == 0 else None
        self._follower = WeightFollower(
            config,
            self.state,
            self._store,
            trainer=self._trainer,
            api=self._engine_api,
            engine=self.engine,
            changed=self._changed,
            name=self.name,
            metrics=metrics,
        )

        self._version = metrics.gauge(
            "rollout_weight_version", "Weights the engine serves; -1 is the base model"
        )
        self._version.set(-1)
        metrics.gauge("rollout_in_traffic", "1 when the router sends requests here").set_function(
            lambda: self._registered
        )

    def _supervised_router(self) -> SupervisedProcess:
        async def launch() -> list[str]:
            self._refuse_taken_port(self._config.rollout.router_port)
            return router_command(self._config, self._topology)

        return SupervisedProcess(
            "router",
            launch,
            self._router_api.unhealthy_reason,
            env=router_env() | self._topology.proxy_env(os.environ),
            log_file=self._config.state_dir / "logs" / f"{self.name}.router.log",
            timing=Timing(max_backoff_s=5, hang_s=self._config.rollout.hang_timeout_s),
        )

    def problem(self) -> str | None:
        """Returns why the node does not serve the newest weights, or None."""
        if self.router is not None and not self.router.up:
            return "the router is starting"
        reason = self.state.problem()
        if reason is not None:
            return reason
        return None if self._registered else "the router does not list this engine as healthy yet"

    def report(self) -> WorkerReport:
        """Returns what the trainer is told of this node."""
        serves = self.state.serves
        return WorkerReport(
            name=self.name,
            url=self.url,
            num_nodes=self._topology.num_nodes,
            state=self.state.worker_state,
            version=None if serves is None else serves.version,
            run_id=None if serves is None else serves.run_id,
            detail=shorten(self.state.detail or self._follower.doing, MAX_DETAIL_CHARS),
            progress=progress.total(),
            tensor_parallel_size=self._config.rollout.tensor_parallel_size,
            gpus=_gpus(self._config.rollout),
            incarnation=self._follower.incarnation,
            libraries=self._libraries,
        )

    def status(self) -> AgentStatus:
        """Returns what the node serves, and its processes."""
        return AgentStatus(
            report=self.report(),
            wanted=None if self.state.wanted is None else self.state.wanted.version,
            registered=self._registered,
            engine_pid=self.engine.pid,
            engine_starts=self.engine.starts,
            router_pid=None if self.router is None else self.router.pid,
        )

    def _changed(self) -> None:
        """Tells the trainer and the router about a change of state."""
        self._version.set(-1 if self.state.serves is None else self.state.serves.version)
        self._wake_report.set()
        self._wake_router.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the node inside the context."""
        loops = [self._start(self._keep_reporting()), self._start(self._reconcile())]
        processes = [self._start(self._run_engine())]
        if self.router is not None:
            processes.append(self._start(self.router.run()))
        try:
            yield
        finally:
            # First the loops, which would register the engine again; then nobody sends it anything.
            await stop(*loops)
            await self._leave()
            await stop(*processes)
            for client in (self._trainer, self._engine_api, self._router_api):
                await client.close()

    def _start(self, loop: _Loop) -> asyncio.Task[None]:
        """Runs a loop in a task; its error ends this process."""

        async def guarded() -> None:
            try:
                await loop
            except Exception as error:
                if not isinstance(error, ServiceError):
                    log.exception("a loop of the agent failed")
                    error = ServiceError(f"internal error: {error!r}", remedy="see the log above")
                self.fatal = self.fatal or error
                signal.raise_signal(signal.SIGTERM)  # the server then leaves `running`

        return asyncio.create_task(guarded())

    async def _keep_reporting(self) -> None:
        while True:
            self._wake_report.clear()
            try:
                await self._trainer.report(self.report())
            except ServiceError as error:
                text = f"could not report to the trainer: {error}"
                self._warnings.warn("report", text, self._trainer.severity)
            await wait_event(self._wake_report, self._heartbeat_s)

    def _refuse_taken_port(self, port: int) -> None:
        """Raises ConfigError when another process listens on the port: it would answer instead of
        the process that is about to start.
        """
        host, port = self._topology.bind(ROLLOUT, port)
        listen(host, port).close()  # it raises

    async def _run_engine(self) -> None:
        await self._follower.fetch_first()
        follow = self._start(self._follower.run())
        try:
            await self.engine.run()
        finally:
            await stop(follow)

    async def _leave(self) -> None:
        """Removes the engine from the router, but gives up after a few seconds, as the router may
        be stopping too.
        """
        self.state.draining = True
        try:
            async with asyncio.timeout(3):
                while not await self._router_api.reconcile(self.url, wanted=False):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except (ServiceError, TimeoutError) as error:
            log.warning(
                "could not deregister this engine from the router: %s", str(error) or "no answer"
            )

    async def _launch_engine(self) -> list[str]:
        """Returns the command of the engine, which starts with the newest verified weights."""
        self._starts.inc()
        if self._libraries is None:
            # The trainer can refuse them before anything is loaded.
            self._libraries = await asyncio.to_thread(engine_libraries, self._config)
            self._changed()
        await self._follower.wait_for_gpus()
        self._refuse_taken_port(self._config.rollout.engine_port)
        self._started_with = await self._stored_weights()
        self.state.detail = ""
        model, label = self._started_model()
        return engine_command(self._config, self._topology, model_path=model, weight_version=label)

    def _started_model(self) -> tuple[str, str]:
        """Returns the path or name of the model that the engine starts with, and its label."""
        if self._started_with is not None:
            manifest, path = self._started_with
            if manifest.kind == "model":
                return str(path), str(manifest.version)
        return self._config.model.name, BASE_VERSION

    async def _stored_weights(self) -> tuple[WeightManifest, Path] | None:
        """Returns the newest weights if they are intact on this node's disk and no engine has
        refused them, and protects them.

        An engine does not start from the trainer's own directory, which the trainer may remove at
        any time.
        """
        newest = self._follower.newest
        if newest is None or WeightId.of(newest[0]) == self._follower.refused:
            return None
        manifest, path = newest
        if self._store.hold(path) and await self._store.verify(manifest, path):
            return newest
        return None

    async def _engine_up(self) -> None:
        _, label = self._started_model()
        await self._engine_api.confirm(label)
        serves = None
        if self._started_with is not None:
            manifest, path = self._started_with
            serves = WeightId.of(manifest)
            if manifest.kind == "adapter":  # an engine starts without an adapter
                await self._follower.load(manifest, path)

        self._store.hold(None)
        self.state.engine_up(serves)
        log.info("the engine serves %s", serves or "the base model")
        self._follower.engine_up()
        self._changed()

    def _engine_down(self, reason: str) -> None:
        self.state.engine_down(reason)
        self._follower.engine_down()
        self._changed()

    async def _reconcile(self) -> None:
        while True:
            self._wake_router.clear()
            wanted = self.state.in_traffic
            done = False
            try:
                done = await self._router_api.reconcile(self.url, wanted)
            except ServiceError as error:
                self._warnings.warn(
                    "router", f"the router does not answer: {error}", self._router_api.severity
                )

            registered = done and wanted
            if registered != self._registered:
                change = "sends traffic to" if registered else "does not list"
                log.info("the router %s %s", change, self.url)
            self._registered = registered
            await wait_event(self._wake_router, _RECONCILE_S if done else 0.2)


def _gpus(rollout: RolloutSection) -> int:
    """Returns the number of GPUs of an engine; the embedded one uses one if this node has any."""
    if rollout.engine == "sglang":
        return rollout.gpus_per_engine if rollout.is_sglang_on_gpus else 0
    if rollout.device == "auto":
        return 0 if assigned_gpus() is None else 1
    return 1 if rollout.device == "cuda" else 0
