"""HTTP of the reward-server: translates requests to calls of `MathGrader`."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from common.observe import Metrics
from common.schemas import BatchRewardRequest, BatchRewardResult, RewardItem, RewardResult
from common.sections import RewardSection
from services.reward.grade import MathGrader
from services.server import create_app

_T = TypeVar("_T")


def create_reward_app(config: RewardSection, max_body_bytes: int = 256 << 20) -> FastAPI:
    """The reward-server. Its grader processes live from the start of the app to its end.

    Raises ConfigError when math-verify is not installed.
    """
    metrics = Metrics("reward_server")
    grader = MathGrader(config, metrics)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with grader:
            yield

    app = create_app(
        "reward-server",
        not_ready=grader.not_ready,
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
    )

    @app.post("/reward")
    async def reward(item: RewardItem, request: Request) -> RewardResult:
        """Grades one answer. `reward` is null when it could not be graded; `status` says why."""
        grader.gold(item.ground_truth, "ground_truth")
        return (await _while_connected(request, grader.grade([item])))[0]

    @app.post("/batch_reward")
    async def batch_reward(body: BatchRewardRequest, request: Request) -> BatchRewardResult:
        """Grades many answers, in order. The means are over the graded ones."""
        return await _while_connected(request, grader.grade_batch(body.items))

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Answers graded so far by status, and the state of the workers."""
        return grader.stats()

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
