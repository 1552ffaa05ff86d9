"""HTTP of the reward-server: translates requests to calls of `Scorer`."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from common.observe import Metrics
from common.schemas import BatchRewardRequest, BatchRewardResult, RewardItem, RewardResult
from common.sections import RewardSection
from services.http.app import create_app
from services.reward.functions.base import RewardFunction
from services.reward.scorer import Scorer

_T = TypeVar("_T")


def create_reward_app(
    config: RewardSection, max_body_bytes: int = 256 << 20, functions: Sequence[RewardFunction] | None = None
) -> FastAPI:
    """The reward-server. Its worker processes live from the start of the app to its end.

    Args:
        config: names the reward functions and their settings.
        max_body_bytes: larger request bodies are refused.
        functions: the caller's own objects, which score every item in threads of this process instead of those that
            `config` names; they need not be importable, nor can they be killed when they hang.

    Raises ConfigError for a function that does not exist or cannot work here, with the remedy.
    """
    metrics = Metrics("reward-server")
    scorer = Scorer(config, metrics, functions)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with scorer:
            yield

    app = create_app(
        "reward-server",
        not_ready=scorer.not_ready,
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        max_requests=config.max_requests,
    )

    @app.post("/reward")
    async def reward(item: RewardItem, request: Request) -> RewardResult:
        """Scores one answer. `reward` is null when it could not be scored; `status` says why."""
        scorer.check(item)
        return (await _while_connected(request, scorer.score([item])))[0]

    @app.post("/batch_reward")
    async def batch_reward(body: BatchRewardRequest, request: Request) -> BatchRewardResult:
        """Scores many answers, in order. The means are over those that have a reward."""
        return await _while_connected(request, scorer.score_batch(body.items))

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Answers scored so far by status, the functions, and the state of the workers."""
        return scorer.stats() | {"load": app.state.load.stats()}

    return app


async def _while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work`; cancels it when the client hangs up, so that nobody's answers occupy no worker."""
    task = asyncio.create_task(work)
    gone = asyncio.ensure_future(request.receive())  # the body is read, so the next message is the disconnect
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise HTTPException(499, "the client closed the connection")
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
