"""The agent of a rollout node: what all agents do.

Every node has one. It runs beside the node's process of an engine, supervises it, keeps weights on
the node's disk and reports. `first_node` has the agent of the first node of an engine, which is
usually the only one; `further_node` has the agent of the others.
"""

import asyncio
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from common.clients.base import Client
from common.errors import ServiceError
from common.process.futures import cancel
from common.process.metrics import Metrics
from common.process.topology import ROLLOUT, TINKER, Topology
from common.settings.config import Config
from services.http.app import listen
from services.rollout.engine_client import engine_env
from services.rollout.loops import RateLimitedWarnings, wait_event
from services.rollout.supervision import SupervisedProcess, Timing
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import TrainerClient

log = logging.getLogger(__name__)
Loop = Coroutine[Any, Any, None]


class Agent(ABC):
    """Runs a rollout node. An error in one of its loops ends this process; `fatal` then holds it.

    `probe` asks the node's process of the engine why it is unhealthy. Reports are at most
    `heartbeat_s` seconds apart.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        metrics: Metrics,
        *,
        probe: Callable[[], Awaitable[str | None]],
        heartbeat_s: float,
    ) -> None:
        rollout = config.rollout
        self.name = topology.own_name(ROLLOUT)
        self.fatal: ServiceError | None = None
        """Why the node cannot continue."""
        self._config = config
        self._topology = topology
        self._heartbeat_s = heartbeat_s
        self._warnings = RateLimitedWarnings()
        self._wake_report = asyncio.Event()
        task = config.rollout.trainer
        port = config.tinker.port if task == TINKER else config.trainer.port
        self._trainer = TrainerClient("trainer", topology.url(task, port))
        # Closed at the end.
        self._clients: list[Client] = [self._trainer]
        self._store = WeightStore(
            config.state_dir / "rollout" / self.name / "weights", self._trainer
        )
        self._starts = metrics.counter(
            "rollout_engine_starts_total", "How often the engine was started"
        )
        self.engine = SupervisedProcess(
            "engine",
            self._launch_engine,
            probe,
            env=engine_env(config) | topology.loopback_env() | topology.proxy_env(os.environ),
            log_file=config.state_dir / "logs" / f"{self.name}.engine.log",
            timing=Timing(stuck_s=rollout.stuck_after_s, hang_s=rollout.hang_timeout_s),
            on_up=self._engine_up,
            on_down=self._engine_down,
            stuck_field="rollout.stuck_after_s",
        )

    @abstractmethod
    def problem(self) -> str | None:
        """Returns why the node does not work as it should, or None."""

    @abstractmethod
    def _loops(self) -> list[Loop]:
        """Returns what runs beside the processes, and ends first."""

    @abstractmethod
    def _processes(self) -> list[Loop]:
        """Returns the supervision of the node's processes."""

    @abstractmethod
    async def _leave(self) -> None:
        """Says that the node ends, before its processes do."""

    @abstractmethod
    async def _send_report(self) -> None:
        """Tells how this node is. Raises ServiceError."""

    @abstractmethod
    async def _launch_engine(self) -> list[str]:
        """Returns the command of this node's process of the engine, once it may start."""

    @abstractmethod
    async def _engine_up(self) -> None:
        """Notes that the engine is healthy. Raises ServiceError when it serves something else."""

    @abstractmethod
    def _engine_down(self, reason: str) -> None:
        """Notes that the engine has ended; it is started again."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the node inside the context."""
        loops = [self._start(loop) for loop in self._loops()]
        processes = [self._start(process) for process in self._processes()]
        try:
            yield
        finally:
            # First the loops, which would register the engine again; then nobody sends it anything.
            await cancel(loops)
            await self._leave()
            await cancel(processes)
            for client in self._clients:
                await client.close()

    def _start(self, loop: Loop) -> asyncio.Task[None]:
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

    async def _keep_reporting(self, listener: Client) -> None:
        while True:
            self._wake_report.clear()
            try:
                await self._send_report()
            except ServiceError as error:
                text = f"could not report to {listener.service}: {error}"
                self._warnings.warn("report", text, listener.severity)
            await wait_event(self._wake_report, self._heartbeat_s)

    def _refuse_taken_port(self, port: int) -> None:
        """Raises ConfigError when another process listens on the port: it would answer instead of
        the process that is about to start.
        """
        host, port = self._topology.bind(ROLLOUT, port)
        listen(host, port).close()  # it raises
