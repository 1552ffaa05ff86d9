"""The critic-server's HTTP API."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

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


def create_critic_app(config: Config) -> FastAPI:
    """Returns the app for the checkpoints in `config.state_dir/critic`; usable in process without
    its lifespan.

    All computation runs in one thread, so that `/health` answers meanwhile and updates run one
    after the other. Raises ConfigError when the value model cannot be loaded.
    """
    service = CriticService(config)
    thread = OneThread("critic")

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await thread.close()

    metrics = Metrics("critic-server")
    app = create_app(
        "critic-server",
        # It waits for a running update; checkpoints are on disk already.
        flush=lambda: thread.call(service.status),
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=config.max_body_mb << 20,
        max_requests=MAX_REQUESTS,
    )
    metrics.gauge("critic_step", "Batches the critic was trained on").set_function(
        lambda: service.status().step
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
        answer = await thread.call(service.values, wanted)
        return Response(codec.encode(answer), media_type=codec.MSGPACK)

    @app.post("/update", **described(struct_schema(UpdateRequest), reads=_KINDS, fails=(409,)))
    async def update(request: Request) -> CriticMetrics:
        """Trains the critic on a batch (msgpack) when it is at `step` of `run_id`; a retry changes
        nothing.
        """
        wanted = await asyncio.to_thread(codec.decode, await request.body(), UpdateRequest)
        result = await thread.call(service.update, wanted)
        skipped.inc(result.skipped)
        for name, gauge in gauges.items():
            number = getattr(result, name)
            gauge.set(math.nan if number is None else number)
        return result

    @app.post("/restore", responses=errors(404, 409))
    async def restore(body: RestoreRequest) -> CriticStatus:
        """Loads the critic saved at `step`; step 0 makes a new one."""
        return await thread.call(service.restore, body)

    @app.post("/save", responses=errors(409))
    async def save(body: SaveRequest) -> CriticStatus:
        """Writes a checkpoint of the critic, which must be at `step` of `run_id`."""
        return await thread.call(service.save, body)

    @app.get("/status")
    async def status() -> CriticStatus:
        """Returns the critic's run and step."""
        return service.status()

    return app
