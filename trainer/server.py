"""The trainer's own HTTP app (rank 0): weight versions for the rollout nodes, health and metrics."""

import asyncio
import threading
from typing import Annotated

from fastapi import FastAPI, Path, Query
from fastapi.responses import FileResponse

from common import watchdog
from common.errors import ConfigError, InvalidInput
from common.observe import Metrics
from common.schemas import WeightChecksums, WeightManifest, WeightVerdict, WorkerReport
from services.openapi import described, errors
from services.server import Server, create_app, listen
from services.story import Work
from trainer.publish import WeightBoard
from trainer.record import StepRecord

_FILE = {"type": "string", "format": "binary"}


def create_trainer_app(board: WeightBoard, metrics: Metrics, max_requests: int = 1024) -> FastAPI:
    """The app of rank 0."""
    app = create_app(
        "ppo-trainer",
        metrics=metrics,
        max_body_bytes=1 << 20,
        max_requests=max_requests,
        work=Work(now=_waits, waits_for="rollout nodes"),
    )

    @app.get("/weights/latest", responses=errors(404))
    async def latest(
        after_run: str = "",
        after_version: int = -1,
        wait_s: Annotated[float, Query(ge=0, le=60)] = 0.0,
        files: bool = False,
    ) -> WeightManifest:
        """The newest weight version, as soon as it is another one than the caller has; with `files` as files in any case."""
        latest = await board.latest_after(after_run, after_version, wait_s)
        return await board.with_files(latest) if files else latest

    @app.post("/weights/{version}/verify", responses=errors(404, 409))
    async def verify(version: Annotated[int, Path(ge=0)], body: WeightChecksums) -> WeightVerdict:
        """Whether an engine has received a broadcast version as it was sent; 409 when it has not."""
        return await board.verify(version, body)

    @app.get("/weights/{version}/files/{name}", **described(answer=_FILE, writes=("application/octet-stream",), fails=(404,)))
    async def weight_file(version: Annotated[int, Path(ge=0)], name: str) -> FileResponse:
        """One file of a weight version."""
        return FileResponse(board.file(version, name), media_type="application/octet-stream")

    @app.post("/workers/{name}")
    async def report(name: str, body: WorkerReport) -> dict[str, str]:
        """An agent tells what its engine serves."""
        if name != body.name:
            raise InvalidInput("path and body name different workers", field="name", value=body.name, remedy=f"say {name}")
        board.report(body)
        return {"status": "noted"}

    @app.get("/workers")
    async def workers() -> list[WorkerReport]:
        """The rollout nodes that are alive and what they serve."""
        return board.workers()

    return app


def _waits() -> str:
    """Where the training loop is and what is awaited, for the log."""
    return "; ".join(filter(None, [watchdog.where(), *watchdog.awaited()]))


class TrainerMetrics:
    """The numbers of the newest step as Prometheus gauges."""

    def __init__(self, metrics: Metrics) -> None:
        self.step = metrics.gauge("step", "Optimiser steps done; also the weight version")
        self.reward = metrics.gauge("reward_mean", "Mean reward of the newest batch")
        self.accuracy = metrics.gauge("accuracy", "Share of correct completions in the newest batch")
        self.update = metrics.gauge("update", "Metrics of the newest update", ["name"])
        self.critic = metrics.gauge("critic", "Metrics of the critic's newest update", ["name"])
        self.seconds = metrics.gauge("step_seconds", "Seconds of the newest step by stage", ["stage"])

    def record(self, record: StepRecord) -> None:
        self.step.set(record.step)
        self.reward.set(record.reward)
        self.accuracy.set(record.accuracy)
        for gauge, values in ((self.update, record.update), (self.critic, record.critic or {}), (self.seconds, record.seconds)):
            for name, value in values.items():
                gauge.labels(name).set(value)


class BackgroundServer:
    """Serves an app from a thread of its own while the training loop computes."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._socket = listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._server = Server(app, host, port)
        self.url = self._server.url
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def __enter__(self) -> "BackgroundServer":
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise ConfigError("the trainer's HTTP server did not start", field="trainer.port")
            self._thread.join(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
