"""The engines of a job group's rollout nodes, whose agents report to the tinker-server as to a
trainer. It has no weights for them: each starts with the base model and gets adapters.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import FastAPI, Query

from common.errors import NotFound
from common.wire.schemas import ReportNoted, WorkerReport
from services.rollout.engine_client import EngineClient

_SILENT_S = 30.0
"""Seconds after which a node that does not report is left out."""


class GroupEngines:
    """The engines of the nodes that report."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._clients: dict[str, EngineClient] = {}
        self.stack = AsyncExitStack()
        """Closes the clients when it is left."""

    def clients(self) -> Sequence[EngineClient]:
        """Returns a client for each engine that serves."""
        now = time.monotonic()
        return [self._clients[url] for url, at in self._heard.items() if now - at < _SILENT_S]

    async def note(self, report: WorkerReport) -> None:
        """Notes what a node says of its engine."""
        if report.state != "ready":
            self._heard.pop(report.url, None)
            return
        if report.url not in self._clients:
            client = EngineClient("engine", report.url)
            self._clients[report.url] = await self.stack.enter_async_context(client)
        self._heard[report.url] = time.monotonic()


def add_nodes(app: FastAPI, engines: GroupEngines) -> None:
    """Adds the calls of the rollout nodes' agents."""

    @app.get("/weights/latest")
    async def latest(wait_s: Annotated[float, Query(ge=0, le=60)] = 0.0) -> None:
        """404, after `wait_s` seconds: there are no weights for all engines."""
        await asyncio.sleep(wait_s)
        raise NotFound("a tinker-server has no weights that all engines serve")

    @app.post("/workers/{name}")
    async def report(name: str, body: WorkerReport) -> ReportNoted:
        """Notes the state of a rollout node."""
        await engines.note(body)
        return ReportNoted()
