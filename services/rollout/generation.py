"""Notices an engine that answers its probes but does not generate, although requests wait for it:
its HTTP server lives on when its scheduler hangs.
"""

import time
from collections.abc import Callable

from common.clients.engines import Engines
from common.process.progress import Progress
from services.rollout.engine_client import EngineClient

_LOOK_S = 5.0


class GenerationProbe:
    """A probe of an engine (`SupervisedProcess`): it is unhealthy when it has not computed a token
    for `limit_s` seconds, although it has requests and is not paused (`is_paused`).
    """

    def __init__(self, api: EngineClient, limit_s: float, is_paused: Callable[[], bool]) -> None:
        self._api = api
        self._limit_s = limit_s
        self._is_paused = is_paused
        self._pause_s = min(_LOOK_S, limit_s / 8)
        self._looked = 0.0
        self._engine = Engines(api.get, [""])
        # None while there is nothing to generate.
        self._waits: Progress | None = None

    async def __call__(self) -> str | None:
        """Returns why the engine is unhealthy, or None."""
        reason = await self._api.unhealthy_reason()
        if reason is not None or self._is_paused():
            self._waits = None
        elif time.monotonic() - self._looked >= self._pause_s:
            await self._look()
            self._looked = time.monotonic()
        if reason is None and self._waits is not None and self._waits.is_stuck:
            return str(self._waits)
        return reason

    async def _look(self) -> None:
        loads = await self._engine.look(0.0)
        if loads is not None and all(load.is_idle for load in loads):  # or it does not say
            self._waits = None
            return

        if self._waits is None:
            self._waits = Progress(
                "an engine that has requests and generates nothing", self._limit_s, counts=False
            )
        said = "its scheduler does not answer"
        if loads is not None:
            running = sum(load.num_running_reqs for load in loads)
            waiting = sum(load.num_waiting_reqs for load in loads)
            said = f"{running} run and {waiting} wait"
        self._waits.saw(self._engine.progress, said)
