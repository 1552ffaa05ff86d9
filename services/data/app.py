"""HTTP API of the data-server. Handlers are plain functions: they run in threads, since storing the
cursor blocks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Query
from prometheus_client import Counter
from pydantic import Field

from common.errors import ConfigError, NotFound
from common.process.metrics import Metrics
from common.settings.config import Config
from common.wire.schemas import (
    MAX_LISTED,
    MAX_NAMES,
    AtMost,
    PassRateReport,
    Prompt,
    PromptBatch,
    Wire,
)
from common.wire.schemas import RequestId as WireRequestId
from services.data.curriculum import Difficulty
from services.data.stream import PromptStream, StreamStats
from services.http.app import create_app
from services.http.openapi import errors

log = logging.getLogger(__name__)
MAX_POSITION = 2**53
MAX_REPEATED = 0.1
"""A larger share of training problems that are there more than once is worth a warning."""
BatchSize = Annotated[int, Query(ge=1, le=256)]
Limit = Annotated[int, Query(ge=0, le=MAX_LISTED)]
Offset = Annotated[int, Query(ge=0)]
RequestId = Annotated[
    str | None,
    Query(pattern=r"^[\x21-\x7e]{1,128}$", description="Printable ASCII; a retry repeats it"),
]


class Position(Wire):
    """Answer of `POST /seek` and `POST /reset`."""

    position: int = Field(ge=0, le=MAX_POSITION)
    """Prompts from the beginning of the shuffled stream, as in `PromptBatch.position`."""


class Seek(Position):
    """Body of `POST /seek`."""

    request_id: WireRequestId | None = None
    """A copy with the same id moves nothing."""
    replaces: str = Field("", max_length=128)
    """The current run, which the caller's run may end; it ends no other one."""


class ListedPrompts(Wire):
    """Answer of `GET /eval_prompts` and `GET /train_prompts`."""

    prompts: Annotated[list[Prompt], AtMost(MAX_LISTED)]
    total_available: int
    """Problems in the split."""


class PassRatesStored(Wire):
    """Answer of `POST /pass_rates`."""

    stored: int
    """Pass rates of the request."""


class DataStats(StreamStats):
    """Answer of `GET /stats`."""

    total_available: int
    """Problems in the training split."""
    total_eval: int
    load: Annotated[dict[str, int], AtMost(MAX_NAMES)]
    """Requests and body bytes in progress, their limits, and the number of refused requests."""


def create_data_app(config: Config, train: list[Prompt], evaluation: list[Prompt]) -> FastAPI:
    """Creates the data-server's app for these prompts.

    Raises ConfigError when an id is in both splits, or the cursor in `config.state_dir` cannot be
    used.
    """
    by_id = {prompt.id: prompt for prompt in train}
    for prompt in evaluation:
        if prompt.id in by_id:
            raise ConfigError(
                f"the id {prompt.id!r} is in both the training and the evaluation split",
                field="data.source",
                value=config.data.source,
                remedy="make the ids unique, or remove the column id",
            )
        by_id[prompt.id] = prompt
    if not config.environment.name:  # episodes of one task differ by themselves
        _warn_of_repeats(train)
    stream = PromptStream(
        train,
        config.seed,
        config.state_dir,
        Difficulty() if config.data.curriculum == "difficulty" else None,
    )

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        yield
        stream.close()

    metrics = Metrics("data-server")
    answered = metrics.counter(
        "data_prompts_total", "Prompts answered, repeated requests included", ["shuffle"]
    )
    app = create_app(
        "data-server",
        flush=lambda: asyncio.to_thread(stream.flush),
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=config.max_body_mb << 20,
        store=stream,
    )

    _add_routes(app, stream, answered, train=train, evaluation=evaluation, by_id=by_id)
    return app


def _warn_of_repeats(train: list[Prompt]) -> None:
    """Warns when many training problems are the same: an epoch then trains on them several
    times.
    """
    different = len({(prompt.prompt, prompt.ground_truth) for prompt in train})
    repeated = len(train) - different
    if repeated > MAX_REPEATED * len(train):
        log.warning(
            "warning: %d of %d training problems repeat another one: only %d are different, and an "
            "epoch trains on them several times; leave the repeated rows out of data.source",
            repeated,
            len(train),
            different,
        )


def _add_routes(
    app: FastAPI,
    stream: PromptStream,
    answered: Counter,
    *,
    train: list[Prompt],
    evaluation: list[Prompt],
    by_id: dict[str, Prompt],
) -> None:
    @app.get("/prompts")
    def prompts(
        batch_size: BatchSize = 8, shuffle: bool = True, request_id: RequestId = None
    ) -> PromptBatch:
        """The next prompts: each once per epoch, unless there is a curriculum.

        A repeated `request_id` returns its batch.
        """
        batch = stream.take(batch_size, shuffle, request_id)
        answered.labels(str(shuffle).lower()).inc(batch_size)
        return batch

    @app.post("/reset")
    def reset() -> Position:
        """Restarts both streams and forgets remembered requests and pass rates."""
        stream.reset()
        return Position(position=0)

    @app.post("/seek")
    def seek(body: Seek) -> Position:
        """Sets the shuffled stream to a position, and a curriculum to its state at that
        position.
        """
        stream.seek(body.position, body.request_id, body.replaces)
        return Position(position=body.position)

    @app.post("/pass_rates")
    def pass_rates(body: PassRateReport) -> PassRatesStored:
        """Reports to the curriculum how often prompts were solved; durable when answered. A
        repeated report counts once.
        """
        stream.report(body.pairs(), body.request_id)
        return PassRatesStored(stored=len(body.prompt_ids))

    @app.get("/prompt/{prompt_id:path}", responses=errors(404))
    def prompt(prompt_id: str) -> Prompt:
        """One problem of either split."""
        if prompt_id not in by_id:
            raise NotFound(
                "there is no such prompt",
                field="id",
                value=prompt_id,
                remedy=f"ids are like {train[0].id}",
            )
        return by_id[prompt_id]

    @app.get("/eval_prompts")
    def eval_prompts(limit: Limit = MAX_LISTED, offset: Offset = 0) -> ListedPrompts:
        """Held-out problems in a fixed order; without `limit`, as many as the largest limit
        allows.
        """
        return _page(evaluation, limit, offset)

    @app.get("/train_prompts")
    def train_prompts(limit: Limit = MAX_LISTED, offset: Offset = 0) -> ListedPrompts:
        """Problems of the training split in the order of the data set; draws none."""
        return _page(train, limit, offset)

    @app.get("/stats", response_model_exclude_none=True)
    def stats() -> DataStats:
        """Sizes of the splits and the state of the shuffled stream."""
        return DataStats(
            **dict(stream.stats()),
            total_available=len(train),
            total_eval=len(evaluation),
            load=app.state.load.stats(),
        )


def _page(prompts: list[Prompt], limit: int, offset: int) -> ListedPrompts:
    return ListedPrompts(prompts=prompts[offset : offset + limit], total_available=len(prompts))
