"""Reading request bodies and waiting for jobs, shared by all routes."""

import asyncio
import contextlib
from typing import TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import InvalidInput, NotReady
from services.engine.engine import Engine
from services.engine.jobs import Job, Sequence
from services.engine.protocol import BadRequest, bad_request
from services.http.app import read_json
from services.http.disconnect import while_wanted

_B = TypeVar("_B", bound=BaseModel)


class Body(BaseModel):
    """A request of SGLang's; fields that this engine does not know are ignored."""

    model_config = ConfigDict(extra="ignore")


async def read_body(request: Request, kind: type[_B]) -> _B:
    """The JSON body as `kind`. Raises BadRequest (400, as SGLang answers), also for an empty body."""
    try:
        return kind.model_validate(await read_json(request))
    except InvalidInput as error:
        raise BadRequest(error.message, field=error.field, remedy=error.remedy) from None
    except ValidationError as error:
        raise bad_request(error) from None


def reply(content: object, status: int = 200) -> Response:
    """A JSON response; orjson, because answers hold tens of thousands of numbers."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def finish(request: Request, engine: Engine, jobs: list[Job]) -> None:
    """Runs jobs to their end. When the client goes away, or one job fails, the others are aborted.

    Raises what a job failed with, Overloaded when the queue is full, ClientGone.
    """
    engine.submit(jobs)
    try:
        await while_wanted(request, asyncio.shield(all_done(jobs)))  # aborted jobs end by themselves
    finally:
        abort_unfinished(engine, jobs)


def all_done(jobs: list[Job]) -> "asyncio.Future[list[list[Sequence]]]":
    """Done when all jobs are, with what they made."""
    done = asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))
    # Looked at, also when nobody waits for it any more: asyncio would log every client that went away as an error.
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return done


def abort_unfinished(engine: Engine, jobs: list[Job]) -> None:
    """Frees the rows of jobs nobody waits for."""
    if any(not job.done.done() for job in jobs):
        with contextlib.suppress(NotReady):  # an engine that is down has no rows
            engine.abort_jobs(jobs)
