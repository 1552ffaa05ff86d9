"""Helpers of the routes: request bodies, answers, jobs and weight updates."""

import asyncio
import contextlib
from pathlib import Path
from typing import TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from common.errors import InvalidInput, NotReady
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob
from services.engine.protocol import BadRequest, bad_request
from services.http.app import read_json
from services.http.disconnect import cancel_on_disconnect

_B = TypeVar("_B", bound=BaseModel)


class Body(BaseModel):
    """A request in SGLang's format; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Returns the JSON body as `kind`. Raises BadRequest (400, as SGLang answers), also for an empty body."""
    try:
        return kind.model_validate(await read_json(request))
    except InvalidInput as error:
        raise BadRequest(error.message, field=error.field, remedy=error.remedy) from None
    except ValidationError as error:
        raise bad_request(error) from None


def reply(content: object, status: int = 200) -> Response:
    """Returns a JSON response, by orjson because answers hold tens of thousands of numbers."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def finish(request: Request, engine: Engine, jobs: list[GenerationJob]) -> None:
    """Runs jobs to their end. When the client disconnects, or one job fails, the others are aborted.

    Raises the error of a failed job, Overloaded when the queue is full, or ClientGone.
    """
    engine.submit(jobs)
    done = asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))
    # Retrieve the exception: asyncio would log it as an error for every client that disconnected.
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        await cancel_on_disconnect(request, asyncio.shield(done))  # aborted jobs end by themselves
    finally:
        if any(not job.done.done() for job in jobs):
            with contextlib.suppress(NotReady):  # an engine that is down has no rows
                engine.call(lambda scheduler: scheduler.abort(lambda sequence: sequence.job in jobs))


async def update_weights(
    engine: Engine, source: Path | dict[str, Tensor], version: str | None, flush_cache: bool, abort_all: bool
) -> int:
    """Loads weights once no request runs, or at once while paused; see `Scheduler.update_weights`."""
    if abort_all:
        engine.call(lambda scheduler: scheduler.abort())
    loaded = engine.call(lambda scheduler: scheduler.update_weights(source, version, flush_cache), exclusive=True)
    return await asyncio.wrap_future(loaded)
