"""HTTP API of the reward-server: translates requests to calls of `RewardService`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from common import Json
from common.process.metrics import Metrics
from common.settings.sections import RewardSection
from common.wire.schemas import (
    BatchRewardRequest,
    BatchRewardResult,
    GroundTruthProblems,
    RewardItem,
    RewardResult,
)
from services.http.app import create_app, read_model
from services.http.disconnect import cancel_on_disconnect
from services.http.openapi import JSON, described
from services.reward.functions.base import RewardFunction
from services.reward.service import RewardService

# Maximum concurrent requests; further ones get a 503.
MAX_REQUESTS = 256


def create_reward_app(
    config: RewardSection,
    max_body_bytes: int = 256 << 20,
    functions: Sequence[RewardFunction] | None = None,
) -> FastAPI:
    """Creates the reward-server's app. Its worker processes live as long as the app.

    Args:
        config: the reward functions and their settings.
        max_body_bytes: larger request bodies are refused.
        functions: the caller's own objects, which score every item in threads of this process
            instead of the functions named by `config`. They need not be importable, and cannot be
            killed when they hang.

    Raises:
        ConfigError: a function does not exist or cannot work here.
    """
    metrics = Metrics("reward-server")
    service = RewardService(config, metrics, functions)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with service:
            yield

    app = create_app(
        "reward-server",
        not_ready=service.not_ready,
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        max_requests=MAX_REQUESTS,
    )

    @app.post("/reward")
    async def reward(item: RewardItem, request: Request) -> RewardResult:
        """Scores one answer. `reward` is null when it could not be scored; `status` says why."""
        service.check(item)
        results = await cancel_on_disconnect(request, service.score([item]))
        return results[0]

    async def batch_reward(request: Request) -> Response:
        """Scores many answers, in order. The means are over the answers with a reward."""
        body = await read_model(request, BatchRewardRequest)
        result = await cancel_on_disconnect(request, service.score_batch(body.items))
        return Response(result.model_dump_json(), media_type=JSON)

    app.add_bare_route(
        "/batch_reward",
        batch_reward,
        response_model=BatchRewardResult,
        **described(BatchRewardRequest),
    )

    @app.post("/check_ground_truths")
    async def check_ground_truths(
        body: BatchRewardRequest, request: Request
    ) -> GroundTruthProblems:
        """Lists the items that no response could solve: their ground truths cannot be read, or do
        not match themselves. The responses of the items are ignored.
        """
        return await cancel_on_disconnect(request, service.check_ground_truths(body.items))

    @app.get("/stats")
    async def stats() -> Json:
        """Returns the answers scored so far by status, the functions, and the state of the
        workers.
        """
        return service.stats() | {"load": app.state.load.stats()}

    return app
