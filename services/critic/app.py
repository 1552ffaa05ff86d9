"""critic-server over HTTP."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from fastapi import FastAPI, Request, Response

from common.config import Config
from common.critic_wire import decode_update_request, decode_value_request, encode_values
from common.fields import MSGPACK
from common.observe import Metrics, critic_gauges
from common.schemas import CriticMetrics, CriticStatus, RestoreRequest, SaveRequest
from services.critic.keeper import CriticKeeper
from services.critic.shapes import UPDATE_REQUEST, VALUE_REQUEST, VALUES
from services.http.app import create_app
from services.http.openapi import described, errors

_P = ParamSpec("_P")
_T = TypeVar("_T")
_KINDS = (MSGPACK,)


def create_critic_app(config: Config) -> FastAPI:
    """The service over the checkpoints in `config.state_dir/critic`; usable in process without its lifespan.

    One thread computes, so that `/health` answers meanwhile and updates come one after the other. Raises ConfigError when
    the value model cannot be loaded.
    """
    keeper = CriticKeeper(config)
    thread = ThreadPoolExecutor(1, thread_name_prefix="critic")

    async def call(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """In the thread. Once begun it is finished, also when the client has gone."""
        run = contextvars.copy_context().run  # what it logs is of this request
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: run(function, *args, **kwargs))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(thread.shutdown)

    metrics = Metrics("critic-server")
    app = create_app(
        "critic-server",
        flush=lambda: call(keeper.status),  # what was to be kept is on disk; a running update is waited for
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=config.max_body_mb << 20,
        max_requests=config.critic.max_requests,
    )
    tell = _gauges(metrics, keeper)

    @app.post("/values", **described(VALUE_REQUEST, VALUES, reads=_KINDS, writes=_KINDS, fails=(409,)))
    async def values(request: Request) -> Response:
        """Values of the states before the completion tokens of a batch of token sequences; msgpack in and out."""
        wanted = await asyncio.to_thread(decode_value_request, await request.body())
        return Response(encode_values(await call(keeper.values, wanted)), media_type=MSGPACK)

    @app.post("/update", **described(UPDATE_REQUEST, reads=_KINDS, fails=(409,)))
    async def update(request: Request) -> CriticMetrics:
        """Trains the critic on a batch (msgpack) when it is at `step` of `run_id`; a retry changes nothing."""
        wanted = await asyncio.to_thread(decode_update_request, await request.body())
        result = await call(keeper.update, wanted)
        tell(result)
        return result

    @app.post("/restore", responses=errors(404, 409))
    async def restore(body: RestoreRequest) -> CriticStatus:
        """The run goes on with the critic that was saved at `step`; step 0 is a new one."""
        return await call(keeper.restore, body)

    @app.post("/save", responses=errors(409))
    async def save(body: SaveRequest) -> CriticStatus:
        """Writes a checkpoint of the critic, which has to be at `step` of `run_id`."""
        return await call(keeper.save, body)

    @app.get("/status")
    async def status() -> CriticStatus:
        """Whose critic this is, and how often it was updated."""
        return keeper.status()

    return app


def _gauges(metrics: Metrics, keeper: CriticKeeper) -> Callable[[CriticMetrics], None]:
    """A function that puts the metrics of an update on /metrics."""
    metrics.gauge("critic_step", "Batches the critic was trained on").set_function(lambda: keeper.status().step)
    skipped = metrics.counter("critic_skipped_updates_total", "Updates not applied because the gradient was not finite")
    gauges = critic_gauges(metrics, "critic")

    def tell(result: CriticMetrics) -> None:
        skipped.inc(result.skipped)
        for name, gauge in gauges.items():
            gauge.set(getattr(result, name))

    return tell
