"""The trainer's own HTTP app (rank 0): weight versions for the rollout nodes, health and
metrics.
"""

import asyncio
import logging
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, get_args

from fastapi import FastAPI, Path, Query
from fastapi.responses import FileResponse, Response

from common.errors import ConfigError, InvalidInput
from common.process import watchdog
from common.process.loop_thread import LoopThread
from common.process.metrics import Metrics
from common.wire.schemas import (
    ReportNoted,
    WeightChecksums,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
    WorkerState,
)
from services.http.app import Server, create_app, listen
from services.http.openapi import described, errors
from trainer.algorithms.spool import read_part
from trainer.dashboard.app import PAGES, add_dashboard
from trainer.dashboard.runs import RunReader
from trainer.diagnosis.health import Health
from trainer.weights.board import WeightBoard

log = logging.getLogger(__name__)
_FILE = {"type": "string", "format": "binary"}
_MAX_REQUESTS = 1024
"""Maximum number of concurrent requests. A rollout node has two: one waits for a new version, one
downloads."""
_FILES_S = 10.0
"""Time to wait for files that are being written, if the caller names none."""


class _LargeFile(FileResponse):
    """A file that is sent in large pieces, since each piece is read in a separate thread."""

    chunk_size = 1 << 20


def _sent(path: pathlib.Path) -> Response:
    """Returns the response with a file."""
    kind = "application/octet-stream"
    if path.stat().st_size > _LargeFile.chunk_size:
        return _LargeFile(path, media_type=kind)
    # It was written just now: reading it takes less than the threads that read a large file.
    return Response(path.read_bytes(), media_type=kind)


def create_trainer_app(
    board: WeightBoard, metrics: Metrics, health: Health | None = None
) -> FastAPI:
    """Returns the app of rank 0, with the dashboard of the run directory, which is the one above
    the board's, and of the `health` of the other tasks.
    """
    app = create_app(
        "ppo-trainer",
        lifespan=health.running if health else None,
        metrics=metrics,
        max_body_bytes=1 << 20,
        max_requests=_MAX_REQUESTS,
        open_paths=PAGES,
        access_level=logging.DEBUG,  # the console is for the steps; agents log what they fetch
    )
    run = RunReader(board.directory.parent, live=True)
    add_dashboard(app, lambda: [run], health)
    nodes = metrics.gauge(
        "trainer_rollout_nodes", "Rollout nodes that are alive, by state", ["state"]
    )
    for state in get_args(WorkerState):
        nodes.labels(state).set_function(partial(board.count, state))

    add_nodes(app, board)

    @app.get("/ranks")
    async def ranks() -> list[watchdog.RankWhere]:
        """What every rank of the trainer is doing; one that does not answer has the `pid` 0."""
        own = watchdog.RankWhere(rank=0, name="rank 0", **watchdog.where().model_dump())
        return [own, *await asyncio.to_thread(watchdog.other_ranks)]

    return app


def add_nodes(app: FastAPI, board: WeightBoard) -> None:
    """Adds the calls of the rollout nodes' agents."""

    @app.get("/weights/latest", responses=errors(404))
    async def latest(
        after_run: str = "",
        after_version: int = -1,
        wait_s: Annotated[float, Query(ge=0, le=60)] = 0.0,
        files: bool = False,
        asleep: bool = False,
    ) -> WeightManifest:
        """The newest weight version, as soon as it differs from the caller's; with `files` as
        files, or with the progress of writing them if they are not there within `wait_s` seconds.

        It also differs when the caller's engine should sleep and is not `asleep`, or vice versa.
        """
        latest = await board.latest_after(after_run, after_version, wait_s, asleep)
        return await board.with_files(latest, wait_s or _FILES_S) if files else latest

    @app.post("/weights/{version}/verify", responses=errors(404, 409))
    async def verify(version: Annotated[int, Path(ge=0)], body: WeightChecksums) -> WeightVerdict:
        """Checks that an engine has received a broadcast version unchanged; 409 when it has not."""
        return await board.verify(version, body)

    @app.get(
        "/weights/{version}/files/{name}",
        **described(answer=_FILE, writes=("application/octet-stream",), fails=(404,)),
    )
    async def weight_file(version: Annotated[int, Path(ge=0)], name: str) -> Response:
        """One file of a weight version."""
        return _sent(board.file(version, name))

    @app.post("/workers/{name}")
    async def report(name: str, body: WorkerReport) -> ReportNoted:
        """Records an agent's report on its engine."""
        if name != body.name:
            raise InvalidInput(
                "path and body name different workers",
                field="name",
                value=body.name,
                remedy=f"send {name}",
            )
        return ReportNoted(may_serve=board.report(body))

    @app.get("/workers")
    async def workers() -> list[WorkerReport]:
        """The rollout nodes that are alive and what they serve."""
        return board.workers()


def add_experts(app: FastAPI, directory: pathlib.Path) -> None:
    """Adds the route to spooled experts (`trainer.algorithms.spool`)."""

    @app.get(
        "/experts/{name}",
        **described(answer=_FILE, writes=("application/octet-stream",), fails=(404,)),
    )
    async def experts(
        name: Annotated[str, Path(pattern=r"^[0-9a-f]{32}\.experts$")],
        start: Annotated[int, Query(ge=0)],
        size: Annotated[int, Query(ge=0)],
    ) -> Response:
        """The experts of some tokens of a group, for a rank of another node."""
        part = await asyncio.to_thread(read_part, directory / name, start, size)
        return Response(part.tobytes(), media_type="application/octet-stream")


class BackgroundServer:
    """Serves an app from a thread while the training loop computes. `died` is called if the thread
    ends by itself.
    """

    def __init__(
        self, app: FastAPI, host: str, port: int, died: Callable[[], None] = lambda: None
    ) -> None:
        self._socket = listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._server = Server(app, host, port)
        self._died = died
        self.url = self._server.url
        self._loop = LoopThread("http")

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        except (Exception, SystemExit):
            log.critical("the thread of the trainer's HTTP server died", exc_info=True)
            for server in getattr(self._server, "servers", []):
                server.close()  # it would accept connections that nobody answers
        if not self._server.should_exit:
            self._died()

    def __enter__(self) -> "BackgroundServer":
        self._loop.open()
        self._task = self._loop.start(self._serve())
        while not self._server.started:
            if self._task.done():
                raise ConfigError(
                    "the trainer's HTTP server did not start",
                    field="trainer.port",
                    value=self.port,
                    remedy="look at the log above, or set another trainer.port",
                )
            self._loop.call(asyncio.wait({self._task}, timeout=0.01))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        if not self._task.done():
            self._loop.call(asyncio.wait({self._task}, timeout=10))
        self._loop.close()
        self._socket.close()  # a server that died left it open
