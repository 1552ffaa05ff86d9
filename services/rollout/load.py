"""What this node's engine has in work, looked at now and then for the log of its agent."""

import asyncio
from typing import Any

from common.errors import ServiceError
from services.http import story
from services.rollout.engine_client import EngineClient
from services.rollout.process import Supervised

_LOOKS = 6
"""Between two lines of the log: work shorter than that may not be seen."""


class EngineLoad:
    """Asks the engine for its load.

    Args:
        api: of the engine.
        engine: the process; it is asked while that is up.
    """

    def __init__(self, api: EngineClient, engine: Supervised) -> None:
        self._api, self._engine = api, engine
        self._text = ""
        self._worked = False

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(story.EVERY_S / _LOOKS)
            if not self._engine.up:
                self._text = ""
                continue
            try:
                response = await self._api.request("GET", "/v1/loads", deadline_s=3)
                self._note(response.json()["loads"])
            except (ServiceError, ValueError, KeyError, TypeError) as error:
                self._text = f"its load is not known: {error}"

    def worked(self) -> bool:
        """Whether there was work since this was last asked."""
        worked, self._worked = self._worked, False
        return worked

    def text(self) -> str:
        """At the last look; empty before the first."""
        return self._text

    def _note(self, loads: list[dict[str, Any]]) -> None:
        running, waiting = (sum(int(load[f"num_{what}_reqs"]) for load in loads) for what in ("running", "waiting"))
        self._worked |= running + waiting > 0
        self._text = f"{running} sequences running, {waiting} waiting"
        if all("gen_throughput" in load for load in loads):  # SGLang's; the embedded engine tells its tokens itself
            self._text += f", {sum(load['gen_throughput'] for load in loads):.0f} tokens/s"
