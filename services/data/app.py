"""HTTP of the data-server. Handlers are plain functions: they run in threads, since storing the cursor blocks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import Field

from common.config import Config
from common.errors import ConfigError, NotFound
from common.observe import Metrics
from common.schemas import PassRateReport, Prompt, PromptBatch, Wire
from services.data.curriculum import Difficulty
from services.data.stream import PromptStream
from services.http.app import create_app
from services.http.openapi import errors

MAX_POSITION = 2**53
BatchSize = Annotated[int, Query(ge=1, le=256)]
RequestId = Annotated[str | None, Query(pattern=r"^[\x21-\x7e]{1,128}$", description="Printable ASCII; a retry repeats it")]


class Seek(Wire):
    """Body of `POST /seek`."""

    position: int = Field(ge=0, le=MAX_POSITION)
    """Prompts from the beginning of the shuffled stream, as in `PromptBatch.position`."""


class Position(Wire):
    """Answer of `POST /reset` and `POST /seek`."""

    position: int


class EvalPrompts(Wire):
    """Answer of `GET /eval_prompts`."""

    prompts: list[Prompt]
    total_available: int
    """Problems in the held-out split."""


class PassRatesStored(Wire):
    """Answer of `POST /pass_rates`."""

    stored: int
    """Pass rates of the request."""


class CurriculumStats(Wire):
    """What a curriculum knows and did."""

    known: int
    """Problems with a pass rate."""
    mean_pass_rate: float | None = None
    """Of the known ones; absent when there is none."""
    drawn_freely: int
    drawn_by_difficulty: int


class DataStats(Wire):
    """Answer of `GET /stats`."""

    total_available: int
    """Problems in the training split."""
    total_eval: int
    position: int
    """Of the shuffled stream, over all epochs."""
    epoch: int
    prompts_served: int
    """By both streams since the state directory was made."""
    curriculum: CurriculumStats | None = None
    """Absent without one."""
    load: dict[str, int]
    """Requests and bytes of bodies in work now, their limits, and how many requests were refused."""


def create_data_app(config: Config, train: list[Prompt], evaluation: list[Prompt]) -> FastAPI:
    """The data-server over these prompts.

    Raises ConfigError when an id is in both splits, or the cursor in `config.state_dir` cannot be used.
    """
    by_id = {prompt.id: prompt for prompt in train}
    if (both := next((prompt.id for prompt in evaluation if prompt.id in by_id), None)) is not None:
        raise ConfigError(
            f"the id {both!r} is in the training and in the evaluation split",
            field="data.source",
            value=config.data.source,
            remedy="make the ids unique, or leave the column id out",
        )
    by_id |= {prompt.id: prompt for prompt in evaluation}
    stream = PromptStream(train, config.seed, config.state_dir, _difficulty(config))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        yield
        stream.close()

    metrics = Metrics("data-server")
    answered = metrics.counter("data_prompts_total", "Prompts answered, repeated requests included", ["shuffle"])
    app = create_app(
        "data-server",
        flush=lambda: asyncio.to_thread(stream.flush),
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=config.max_body_mb << 20,
    )

    @app.get("/prompts")
    def prompts(batch_size: BatchSize = 8, shuffle: bool = True, request_id: RequestId = None) -> PromptBatch:
        """The next prompts: each once an epoch, unless there is a curriculum. The same `request_id` gets the same batch."""
        taken = stream.take(batch_size, shuffle, request_id)
        answered.labels(str(shuffle).lower()).inc(batch_size)
        return PromptBatch(prompts=taken.prompts, total_available=len(train), epoch=taken.epoch, position=taken.position)

    @app.get("/prompt/{prompt_id:path}", responses=errors(404))
    def prompt(prompt_id: str) -> Prompt:
        """One problem of either split."""
        if prompt_id not in by_id:
            raise NotFound("there is no such prompt", field="id", value=prompt_id, remedy=f"ids are like {train[0].id}")
        return by_id[prompt_id]

    @app.post("/reset")
    def reset() -> Position:
        """Both streams start over; remembered requests and pass rates are forgotten."""
        stream.reset()
        return Position(position=0)

    @app.post("/seek")
    def seek(body: Seek) -> Position:
        """Sets the shuffled stream to a position; a curriculum to what it knew there."""
        stream.seek(body.position)
        return Position(position=body.position)

    @app.post("/pass_rates")
    def pass_rates(body: PassRateReport) -> PassRatesStored:
        """Tells the curriculum how often prompts were solved; durable when answered. A repeated `request_id` counts once."""
        stream.report(body.pairs(), body.request_id)
        return PassRatesStored(stored=len(body.prompt_ids))

    @app.get("/eval_prompts")
    def eval_prompts(limit: Annotated[int | None, Query(ge=0)] = None, offset: Annotated[int, Query(ge=0)] = 0) -> EvalPrompts:
        """Held-out problems in a fixed order; all of them without a limit."""
        end = None if limit is None else offset + limit
        return EvalPrompts(prompts=evaluation[offset:end], total_available=len(evaluation))

    @app.get("/stats", response_model_exclude_none=True)
    def stats() -> DataStats:
        """Sizes of the splits and where the shuffled stream is."""
        now = stream.progress()
        return DataStats(
            total_available=len(train),
            total_eval=len(evaluation),
            position=now.position,
            epoch=now.epoch,
            prompts_served=now.served,
            curriculum=CurriculumStats(**asdict(now.curriculum)) if now.curriculum else None,
            load=app.state.load.stats(),
        )

    return app


def _difficulty(config: Config) -> Difficulty | None:
    return None if config.data.curriculum == "none" else Difficulty()
