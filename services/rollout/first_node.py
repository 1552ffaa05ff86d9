"""The agent of the first node of an engine, which is usually the engine's only node: keeps the
engine running, updates its weights, and registers it with the router.

Its loops share one `NodeState`: supervision of the engine, weight updates, registration, and
reports to the trainer. On node 0 a further loop supervises the router. If the engine is larger than
a node, one more watches the other nodes (`engine_nodes`).
"""

import asyncio
import logging
import os
import time
from pathlib import Path

from pydantic import BaseModel

from common.clients.rollout import BASE_VERSION
from common.clients.unreachable import problem_of
from common.errors import ServiceError, shorten
from common.process import progress
from common.process.futures import cancel
from common.process.metrics import Metrics
from common.process.topology import ROLLOUT, Topology, assigned_gpus
from common.settings.config import Config
from common.settings.sections import RolloutSection
from common.wire.schemas import (
    MAX_DETAIL_CHARS,
    EngineLibraries,
    EngineStart,
    WeightManifest,
    WorkerReport,
)
from services.http.app import free_port
from services.rollout.agent import Agent, Loop
from services.rollout.engine_client import EngineClient, engine_command, engine_libraries
from services.rollout.engine_nodes import EngineNodes, NodeCannotStart, weights_for_nodes
from services.rollout.generation import GenerationProbe
from services.rollout.loops import wait_event
from services.rollout.router import RouterClient, router_command, router_env
from services.rollout.state import NodeState
from services.rollout.supervision import SupervisedProcess, Timing
from services.rollout.weights.follow import WeightFollower
from services.rollout.weights.trainer_client import WeightId

log = logging.getLogger(__name__)
_HEARTBEAT_S = 5.0
# Reports of progress, at least, within the time after which the trainer fences a silent node.
_REPORTS = 8
# After this long without an answer of the trainer, the engine leaves the router: before the trainer
# goes on without the node (`trainer.weights.board`, 30 s), which could not keep it out.
_CUT_OFF_S = 20.0
_RECONCILE_S = 1.0
_ASK_ROUTER_S = 0.5
_WATCH_S = 1.0


class FirstNodeStatus(BaseModel):
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


class FirstNodeAgent(Agent):
    """The agent that decides for an engine and speaks for it to trainer and router."""

    def __init__(self, config: Config, topology: Topology, metrics: Metrics) -> None:
        rollout = config.rollout
        self.url = topology.url(ROLLOUT, rollout.engine_port, topology.node_rank)
        self._engine_api = EngineClient("engine", self.url)
        super().__init__(
            config,
            topology,
            metrics,
            probe=GenerationProbe(
                self._engine_api, rollout.stuck_after_s, lambda: self._engine_api.is_paused
            ),
            heartbeat_s=min(_HEARTBEAT_S, config.limits.fence_after_s / _REPORTS),
        )
        self.state = NodeState()
        self._libraries: EngineLibraries | None = None
        self._registered = False
        # When the last report was sent that the trainer has answered; None before the first.
        self._heard_at: float | None = None
        # Whether the trainer then said that the engine may get requests.
        self._may_serve = True
        self._starts_ordered = 0
        # The weights that the engine was started with; None for the base model.
        self._started_with: tuple[WeightManifest, Path] | None = None
        self._wake_router = asyncio.Event()
        self._router_api = RouterClient("router", topology.url(ROLLOUT, rollout.router_port))
        self._clients += [self._engine_api, self._router_api]

        others = range(topology.node_rank + 1, topology.node_rank + rollout.nodes_per_engine)
        self.nodes = EngineNodes(
            [f"{ROLLOUT}-{rank}" for rank in others],
            silent_s=rollout.hang_timeout_s,
            stuck_after_s=rollout.stuck_after_s,
        )
        """The other nodes of the engine; none if it is one node's."""
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
            nodes=self.nodes,
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
            nodes_per_engine=self._config.rollout.nodes_per_engine,
            gpus=_gpus(self._config.rollout),
            incarnation=self._follower.incarnation,
            libraries=self._libraries,
        )

    def status(self) -> FirstNodeStatus:
        """Returns what the node serves, and its processes."""
        return FirstNodeStatus(
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
        if self.state.in_traffic != self._registered:
            self._wake_router.set()

    def _loops(self) -> list[Loop]:
        return [
            self._keep_reporting(self._trainer),
            self._reconcile(),
            self._watch_nodes(),
            self._follower.watch(),
        ]

    def _processes(self) -> list[Loop]:
        processes = [self._run_engine()]
        if self.router is not None:
            processes.append(self.router.run())
        return processes

    async def _send_report(self) -> None:
        sent = time.monotonic()
        self._may_serve = await self._trainer.report(self.report())
        self._heard_at = sent
        if self._wants_traffic() != self._registered:
            self._wake_router.set()

    def _wants_traffic(self) -> bool:
        """Decides whether the engine is cut off from the trainer; returns whether the router should
        list it now.
        """
        if self._heard_at is None:
            # Without a trainer, as before the first one starts, there are no newer weights.
            self.state.cut_off = self._follower.is_trainer_silent
        else:
            silence_s = time.monotonic() - self._heard_at
            self.state.cut_off = not self._may_serve or silence_s > _CUT_OFF_S
        return self.state.in_traffic

    async def _run_engine(self) -> None:
        await self._follower.fetch_first()
        follow = self._start(self._follower.run())
        try:
            await self.engine.run()
        finally:
            await cancel([follow])

    async def _leave(self) -> None:
        """Removes the engine from the router, but gives up after a few seconds, as the router may
        be stopping too.
        """
        self.state.draining = True
        try:
            async with asyncio.timeout(3):
                await self._remove()
        except (ServiceError, TimeoutError) as error:
            log.warning(
                "could not deregister this engine from the router: %s", str(error) or "no answer"
            )

    async def _remove(self) -> None:
        """Returns when the router does not list the engine. Raises ServiceError."""
        while not await self._router_api.reconcile(  # noqa: ASYNC110
            self.url, lambda: False, deadline_s=_ASK_ROUTER_S
        ):
            await asyncio.sleep(0.05)

    async def _remove_before_start(self) -> None:
        """Returns when the router does not list the engine, as it may from an earlier life of this
        node: the engine would get requests as soon as it answers, whatever it serves.
        """
        while True:
            try:
                await self._remove()
                return
            except ServiceError as error:
                if problem_of(error) != "silent":
                    return  # there is no router, which would list nothing, or it refuses
                self._warnings.warn("router", f"the engine waits for the router: {error}")

    async def _launch_engine(self) -> list[str]:
        """Returns the command of this node's process of the engine, which starts with the newest
        verified weights, when the engine's other nodes start theirs.
        """

        def say(what: str) -> None:
            log.info("the start of the engine %s", what)
            self.state.detail = what
            self._changed()

        self._starts.inc()
        if self._libraries is None:
            # The trainer can refuse them before anything is loaded.
            self._libraries = await asyncio.to_thread(engine_libraries, self._config)
            self._changed()
        await self._remove_before_start()
        await self._follower.wait_for_gpus()
        self._refuse_taken_port(self._config.rollout.engine_port)
        self._started_with = await self._stored_weights()
        try:
            start = self._next_start()
            await self.nodes.start(start, say)
        except NodeCannotStart as error:
            # The trainer may have removed this version meanwhile, or be gone: newer weights follow.
            log.error("the engine starts with the base model: %s", error)
            self._started_with = None
            start = self._next_start()
            await self.nodes.start(start, say)

        self.state.detail = ""
        return engine_command(
            self._config,
            self._topology,
            model_path=start.model_path,
            weight_version=start.weight_version,
            dist_init_addr=start.dist_init_addr,
        )

    def _started_model(self) -> tuple[str, str]:
        """Returns the path or name of the model that the engine starts with, and its label."""
        if self._started_with is not None:
            manifest, path = self._started_with
            if manifest.kind == "model":
                return str(path), str(manifest.version)
        return self._config.model.name, BASE_VERSION

    def _next_start(self) -> EngineStart:
        """Describes the next start for the other nodes."""
        model, label = self._started_model()
        weights = None
        if self._started_with is not None:
            weights = weights_for_nodes(*self._started_with)
        # A new port for every start: a process that hangs may still hold the last one.
        host = self._topology.host(ROLLOUT, self._topology.node_rank)
        self._starts_ordered += 1
        return EngineStart(
            id=f"{self._follower.incarnation}-{self._starts_ordered}",
            dist_init_addr=f"{host}:{free_port()}",
            model_path=model,
            weight_version=label,
            weights=weights,
        )

    async def _watch_nodes(self) -> None:
        """Restarts the engine when another node's part of it has ended or is lost."""
        while True:
            looked = time.monotonic()
            await self.nodes.news(_WATCH_S)
            # If a look came late, this process was stopped, which says nothing about the nodes.
            was_stopped = time.monotonic() - looked > 3 * _WATCH_S
            problem = self.nodes.problem()
            if problem is not None and not was_stopped:
                self.engine.restart(problem)

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
        self.nodes.stop()
        self.state.engine_down(reason)
        self._follower.engine_down()
        self._changed()

    async def _reconcile(self) -> None:
        while True:
            self._wake_router.clear()
            wanted = self._wants_traffic()
            done = False
            try:
                done = await self._router_api.reconcile(self.url, self._wants_traffic)
            except ServiceError as error:
                self._warnings.warn(
                    "router", f"the router does not answer: {error}", self._router_api.severity
                )

            registered = done and wanted and self.state.in_traffic
            if registered != self._registered:
                log.info(
                    "the router %s %s",
                    "sends traffic to" if registered else "does not list",
                    self.url,
                )
            self._registered = registered
            if self.state.in_traffic == wanted:
                await wait_event(self._wake_router, _RECONCILE_S if done else 0.2)


def _gpus(rollout: RolloutSection) -> int:
    """Returns the number of GPUs of an engine; the embedded one uses one if this node has any."""
    if rollout.engine == "sglang":
        return rollout.gpus_per_engine if rollout.is_sglang_on_gpus else 0
    if rollout.device == "auto":
        return 0 if assigned_gpus() is None else 1
    return 1 if rollout.device == "cuda" else 0
