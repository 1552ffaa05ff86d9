"""The critic-server's HTTP API."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from common.errors import NotReady
from common.process.metrics import Metrics, critic_gauges
from common.settings.config import Config
from common.wire import codec
from common.wire.schemas import (
    CriticMetrics,
    CriticStatus,
    RestoreRequest,
    SaveRequest,
    UpdateRequest,
    ValueRequest,
    Values,
)
from services.critic.service import CriticService
from services.http.app import create_app
from services.http.one_thread import OneThread
from services.http.openapi import described, errors, struct_schema

_KINDS = (codec.MSGPACK,)
_VALUE_REQUEST = struct_schema(ValueRequest) | {
    "dependentRequired": {"run_id": ["step"], "step": ["run_id"]},
    "examples": [{"sequences": [{"prompt_ids": [5, 6], "completion_ids": [7, 2]}]}],
}
MAX_REQUESTS = 16
"""Maximum concurrent requests; the critic computes them one after the other."""


class _Loaded:
    """The critic of a server, and the thread that computes with it.

    With `failed` the model is loaded inside `running`, and `failed` gets the error; else at once.
    """

    def __init__(self, config: Config, failed: Callable[[Exception], None] | None) -> None:
        self._config = config
        self._failed = failed
        self._service = None if failed else CriticService(config)
        self.thread = OneThread("critic")

    def problem(self) -> str | None:
        """Returns why the critic cannot compute yet, or None."""
        return "the value model is being loaded" if self._service is None else None

    @property
    def service(self) -> CriticService:
        """The critic. Raises NotReady while it is being loaded."""
        if self._service is None:
            raise NotReady("the value model is being loaded", remedy="ask again")
        return self._service

    async def _load(self) -> None:
        try:
            self._service = self._service or await self.thread.call(CriticService, self._config)
        except Exception as error:
            assert self._failed is not None, "without it the critic is there"
            self._failed(error)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads the critic, unless that was done; on exit waits for the computation in progress."""
        loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            loading.cancel()
            await self.thread.close()


def create_critic_app(config: Config, failed: Callable[[Exception], None] | None = None) -> FastAPI:
    """Returns the app for the checkpoints in `config.state_dir/critic`; usable in process without
    its lifespan.

    All computation runs in one thread, so that `/health` answers meanwhile and updates run one
    after the other. Raises ConfigError when the value model cannot be loaded. With `failed` the
    model is loaded while the app serves: `/health` shows the progress, and `failed` gets the error.
    """
    critic = _Loaded(config, failed)
    thread = critic.thread
    metrics = Metrics("critic-server")
    app = create_app(
        "critic-server",
        not_ready=critic.problem,
        # It waits for a running update; checkpoints are on disk already.
        flush=lambda: thread.call(critic.service.status),
        lifespan=critic.running,
        metrics=metrics,
        max_body_bytes=config.max_body_mb << 20,
        max_requests=MAX_REQUESTS,
    )
    metrics.gauge("critic_step", "Batches the critic was trained on").set_function(
        lambda: 0 if critic.problem() else critic.service.status().step
    )
    skipped = metrics.counter(
        "critic_skipped_updates_total", "Updates not applied because the gradient was not finite"
    )
    gauges = critic_gauges(metrics, "critic")

    @app.post(
        "/values",
        **described(
            _VALUE_REQUEST, struct_schema(Values), reads=_KINDS, writes=_KINDS, fails=(409,)
        ),
    )
    async def values(request: Request) -> Response:
        """Returns the values of the states before the completion tokens of token sequences; msgpack
        in and out.
        """
        wanted = await asyncio.to_thread(codec.decode, await request.body(), ValueRequest)
        answer = await thread.call(critic.service.values, wanted)
        return Response(codec.encode(answer), media_type=codec.MSGPACK)

    @app.post("/update", **described(struct_schema(UpdateRequest), reads=_KINDS, fails=(409,)))
    async def update(request: Request) -> CriticMetrics:
        """Trains the critic on a batch (msgpack) when it is at `step` of `run_id`; a retry changes
        nothing.
        """
        wanted = await asyncio.to_thread(codec.decode, await request.body(), UpdateRequest)
        result = await thread.call(critic.service.update, wanted)
        skipped.inc(result.skipped)
        for name, gauge in gauges.items():
            number = getattr(result, name)
            gauge.set(math.nan if number is None else number)
        return result

    @app.post("/restore", responses=errors(404, 409))
    async def restore(body: RestoreRequest) -> CriticStatus:
        """Loads the critic saved at `step`; step 0 makes a new one."""
        return await thread.call(critic.service.restore, body)

    @app.post("/save", responses=errors(409))
    async def save(body: SaveRequest) -> CriticStatus:
        """Writes a checkpoint of the critic, which must be at `step` of `run_id`."""
        return await thread.call(critic.service.save, body)

    @app.get("/status")
    async def status() -> CriticStatus:
        """Returns the critic's run and step."""
        return critic.service.status()

    return app
