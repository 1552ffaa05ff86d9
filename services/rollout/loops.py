"""What all agents do: run loops, and supervise the node's process of an engine."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from common.errors import ServiceError
from common.process.topology import ROLLOUT, Topology
from common.settings.config import Config
from services.http.app import listen
from services.rollout.engine_client import engine_env
from services.rollout.process import Supervised, Timing

log = logging.getLogger(__name__)


class Loops:
    """The tasks of an agent. An error in one of them calls `end`; `fatal` then holds it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.fatal: ServiceError | None = None
        self._end = end

    def start(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a loop in a task."""

        async def guarded() -> None:
            try:
                await loop
            except Exception as error:
                if not isinstance(error, ServiceError):
                    log.exception("a loop of the agent failed")
                    error = ServiceError(f"internal error: {error!r}", remedy="see the log above")
                self.fatal = self.fatal or error
                self._end()

        return asyncio.create_task(guarded())


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancels the loops and waits for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for the event, at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def refuse_taken_port(topology: Topology, port: int) -> None:
    """Raises ConfigError when another process listens on the port: it would answer instead of the
    process that is about to start.
    """
    host, port = topology.bind(ROLLOUT, port)
    listen(host, port).close()


def supervised_engine(
    config: Config,
    topology: Topology,
    *,
    launch: Callable[[], Awaitable[list[str]]],
    probe: Callable[[], Awaitable[str | None]],
    on_up: Callable[[], Awaitable[None]],
    on_down: Callable[[str], None],
) -> Supervised:
    """Returns the supervision of this node's process of an engine."""
    rollout = config.rollout
    return Supervised(
        "engine",
        launch,
        probe,
        env=engine_env(config) | topology.loopback_env() | topology.proxy_env(os.environ),
        log_file=config.state_dir / "logs" / f"{topology.own_name(ROLLOUT)}.engine.log",
        timing=Timing(stuck_s=rollout.stuck_after_s, hang_s=rollout.hang_timeout_s),
        on_up=on_up,
        on_down=on_down,
        stuck_field="rollout.stuck_after_s",
    )
