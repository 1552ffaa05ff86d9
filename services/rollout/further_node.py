"""The agent of a further node of an engine that is larger than one node.

It runs this node's process of the engine and keeps the weights on this node's disk, both as the
agent of the first node orders (`engine_nodes`). This process answers no requests for completions:
the router and the trainer know only the first node.
"""

import asyncio
import logging
from pathlib import Path

import httpx
from pydantic import BaseModel

from common.clients.base import Client
from common.errors import ServiceError, shorten
from common.process import progress
from common.process.metrics import Metrics
from common.process.topology import ROLLOUT, Topology
from common.settings.config import Config
from common.wire.schemas import (
    MAX_DETAIL_CHARS,
    EngineNodeReport,
    EngineOrder,
    EngineStart,
    EngineWeights,
)
from services.rollout.agent import Agent, Loop
from services.rollout.engine_client import engine_command, first_node
from services.rollout.loops import wait_event
from services.rollout.weights.store import differs

log = logging.getLogger(__name__)
# Short, because the agent of the first node answers it before it ends.
_POLL_S = 2.0
_HEARTBEAT_S = 2.0
_LOOK_S = 1.0
_RETRY_S = 1.0
_LAST_REPORT_S = 2.0


class FurtherNodeStatus(BaseModel):
    """Answer of `GET /status`."""

    report: EngineNodeReport
    first_node: str
    """The node whose agent decides, and whose engine process serves requests."""
    engine_pid: int | None
    """Id of the process group."""
    engine_starts: int


class FirstNodeClient(Client):
    """Client of the agent of the engine's first node."""

    start_s = 60.0

    async def order(self, after: str, wait_s: float) -> EngineOrder:
        """Returns the newest order, waiting for one other than `after`. Raises ServiceError."""
        parameters: dict[str, str | float] = {"after": after, "wait_s": wait_s}
        return await self.json(
            "GET", "/engine", EngineOrder, params=parameters, deadline_s=wait_s + 10
        )

    async def report(self, report: EngineNodeReport) -> None:
        """Says how this node is. Raises ServiceError."""
        await self.request("POST", "/engine/nodes", json=report.model_dump(), deadline_s=5)


class FurtherNodeAgent(Agent):
    """The agent of a further node of an engine, which does as the agent of the first node says."""

    def __init__(self, config: Config, topology: Topology, metrics: Metrics) -> None:
        rollout = config.rollout
        own_url = topology.url(ROLLOUT, rollout.engine_port, topology.node_rank)
        # SGLang answers /health on these nodes too, but never with TLS, and to anyone.
        self._engine_api = Client("engine", own_url.replace("https://", "http://"), headers={})
        super().__init__(
            config,
            topology,
            metrics,
            probe=self._engine_api.unhealthy_reason,
            heartbeat_s=min(_HEARTBEAT_S, rollout.hang_timeout_s / 4),
        )
        first = first_node(config, topology)
        self.first_node = f"{ROLLOUT}-{first}"
        # Why the orders may be out of date; empty when they are not.
        self._unreachable = f"{self.first_node} has not answered yet"
        self._order = EngineOrder(revision="")
        # Set at every new order.
        self._news = asyncio.Event()
        self._state = EngineNodeReport(name=self.name)
        self._storing = asyncio.Lock()

        self._first = FirstNodeClient(
            self.first_node, topology.url(ROLLOUT, rollout.agent_port, first)
        )
        self._clients += [self._first, self._engine_api]

    def problem(self) -> str | None:
        """Returns why this node's part of the engine does not work, or None."""
        if self._unreachable:
            return self._unreachable
        if not self.engine.up:
            return f"this node's process of the engine of {self.first_node} is not up: " + (
                self._state.ended or self._state.detail or "it starts"
            )
        return None

    def report(self) -> EngineNodeReport:
        """Returns what the first node is told."""
        return self._state.model_copy(
            update={
                "ended": shorten(self._state.ended, MAX_DETAIL_CHARS),
                "detail": shorten(self._state.detail, MAX_DETAIL_CHARS),
                "progress": progress.total(),
            }
        )

    def status(self) -> FurtherNodeStatus:
        """Returns the state of this node and of its process."""
        return FurtherNodeStatus(
            report=self.report(),
            first_node=self.first_node,
            engine_pid=self.engine.pid,
            engine_starts=self.engine.starts,
        )

    def _loops(self) -> list[Loop]:
        return [
            self._keep_reporting(self._first),
            self._follow(),
            self._keep_weights(),
            self._end_unwanted(),
        ]

    def _processes(self) -> list[Loop]:
        return [self.engine.run()]

    async def _send_report(self) -> None:
        await self._first.report(self.report())

    async def _leave(self) -> None:
        """Tells the first node that the engine ends here, so that it takes it out of traffic."""
        self._changed(ended="this node shuts down")
        try:
            async with asyncio.timeout(_LAST_REPORT_S):
                await self._send_report()
        except (ServiceError, TimeoutError) as error:
            log.info("%s was not told of the end: %s", self.first_node, error)

    def _changed(self, **fields: str) -> None:
        """Changes the state of this node, and has it reported."""
        self._state = self._state.model_copy(update=fields)
        self._wake_report.set()

    async def _follow(self) -> None:
        """Follows the orders of the first node."""
        while True:
            try:
                order = await self._first.order(self._order.revision, _POLL_S)
            except ServiceError as error:
                self._unreachable = f"{self.first_node} gives no orders: {error}"
                self._warnings.warn("orders", self._unreachable, self._first.severity)
                await asyncio.sleep(_RETRY_S)
                continue
            self._unreachable = ""
            if order.revision != self._order.revision:
                self._order = order
                self._news.set()
                self._news = asyncio.Event()

    async def _end_unwanted(self) -> None:
        """Ends a process that the first node does not want any more."""
        while True:
            start = self._order.start
            wanted = "" if start is None else start.id
            if self.engine.pid is not None and self._state.start != wanted:
                self.engine.restart(f"{self.first_node} ends or restarts the engine")
            await wait_event(self._news, _LOOK_S)

    async def _launch_engine(self) -> list[str]:
        """Returns the command of this node's process, when the first node says so."""
        start = await self._next_start()
        self._starts.inc()
        self._refuse_taken_port(self._config.rollout.engine_port)
        self._changed(start=start.id, ended="", detail="")
        return engine_command(
            self._config,
            self._topology,
            model_path=start.model_path,
            weight_version=start.weight_version,
            dist_init_addr=start.dist_init_addr,
        )

    async def _next_start(self) -> EngineStart:
        """Prepares the starts that the first node orders; returns the one whose process may
        start.
        """
        while True:
            start = self._order.start
            if start is None or start.id in (self._state.start, self._state.cannot_start):
                await wait_event(self._news, _LOOK_S)
            elif self._state.prepared != start.id and start.go:
                # It began before this agent, whose process is gone and cannot be replaced.
                self._changed(start=start.id, ended="its agent was started again")
            elif self._state.prepared != start.id:
                await self._prepare(start)
            elif start.go:
                return start
            else:
                await wait_event(self._news, _LOOK_S)

    async def _prepare(self, start: EngineStart) -> None:
        """Gets the weights of a start and reports that this node is prepared, or that it cannot."""
        try:
            if start.weights is not None:
                own = await self._hold(start.weights)
                # Not stored here: they are the trainer's. What is stored may be damaged.
                is_stored = self._store.hold(own)
                if is_stored and not await self._store.verify(start.weights.manifest, own):
                    self._store.hold(await self._hold(start.weights))
        except (httpx.HTTPError, ServiceError, OSError) as error:
            self._changed(cannot_start=start.id, detail=f"{type(error).__name__} {error}")
            log.error("this node cannot start the engine: %s", self._state.detail)
        else:
            self._changed(prepared=start.id)

    async def _keep_weights(self) -> None:
        """Stores on this node's disk the weights that the first node orders."""
        while True:
            weights = self._order.weights
            if weights is None or weights.key == self._state.holds:
                await wait_event(self._news, _LOOK_S)
                continue
            try:
                await self._hold(weights)
                self._changed(holds=weights.key, detail="")
            except (httpx.HTTPError, ServiceError, OSError) as error:
                version = weights.manifest.version
                reason = f"cannot hold weights {version}: {type(error).__name__} {error}"
                self._changed(detail=reason)
                self._warnings.warn("weights", reason, logging.ERROR)
                await wait_event(self._news, _RETRY_S)

    async def _hold(self, weights: EngineWeights) -> Path:
        """Fetches weights and makes them readable where the engine reads them on all nodes; returns
        this node's own directory of them.
        """
        async with self._storing:
            own = await self._store.fetch(weights.manifest)
            if weights.path:
                await asyncio.to_thread(make_readable, Path(weights.path), own, weights)
        return own

    async def _engine_up(self) -> None:
        self._store.hold(None)

    def _engine_down(self, reason: str) -> None:
        self._changed(ended=reason)


def make_readable(path: Path, own: Path, weights: EngineWeights) -> None:
    """Makes the files in `own` readable at `path`, which is the first node's directory of them.

    On a disk that the nodes share they are there already. On a disk of its own, `path` becomes a
    link. Raises OSError when something else is there.
    """
    if path == own:
        return
    if path.is_dir() and not path.is_symlink():
        problem = differs(path, weights.manifest.files, progress.moved)
        if problem is None:
            return
        raise OSError(
            f"the engine reads weights {weights.manifest.version} from {path} on all of its nodes, "
            f"and on this node that folder holds something else: {problem}; remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.iterdir():
        if other.is_symlink() and not other.exists():
            other.unlink()  # to a version that this node has removed
    path.unlink(missing_ok=True)
    path.symlink_to(own)
