"""Helpers of the routes: request bodies, answers, jobs and weight updates."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from common.errors import InvalidInput, NotReady
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob
from services.engine.model import Model
from services.engine.protocol import BadRequest, bad_request, score_answer
from services.engine.scheduler import Scheduler
from services.http.app import SMALL_BYTES, read_json
from services.http.disconnect import cancel_on_disconnect

SCORED_LOGITS = 1 << 27
"""Maximum logits in memory when prompts are scored, unless a single prompt has more."""
_B = TypeVar("_B", bound=BaseModel)
_T = TypeVar("_T")


class Body(BaseModel):
    """A request in SGLang's format; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Returns the JSON body as `kind`. Raises BadRequest (400, as SGLang answers), also for an
    empty body.
    """
    try:
        return kind.model_validate(await read_json(request))
    except InvalidInput as error:
        raise BadRequest(error.message, field=error.field, remedy=error.remedy) from None
    except ValidationError as error:
        raise bad_request(error) from None


async def make_jobs(request: Request, jobs: Callable[[Model], _T], model: Model) -> _T:
    """Returns the `jobs` of a body; large bodies are tokenised and checked in a thread."""
    if len(await request.body()) < SMALL_BYTES:
        return jobs(model)
    return await asyncio.to_thread(jobs, model)


def reply(content: object, status: int = 200) -> Response:
    """Returns a JSON response, encoded by orjson because answers hold tens of thousands of
    numbers.
    """
    return Response(orjson.dumps(content), status, media_type="application/json")


async def finish(request: Request, engine: Engine, jobs: list[GenerationJob]) -> None:
    """Runs jobs to their end. When the client disconnects, or one job fails, the others are
    aborted.

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
                engine.call(
                    lambda scheduler: scheduler.abort(lambda sequence: sequence.job in jobs)
                )


async def score(
    request: Request, engine: Engine, prompts: list[list[int]], start: int
) -> list[dict[str, Any]]:
    """Returns the answers for the log-probabilities of prompts, computed in parts so that running
    rows continue.

    Raises BadRequest when `start` is beyond the end of a prompt, or ClientGone.
    """
    shortest = min(map(len, prompts))
    if shortest <= start:
        raise BadRequest(
            f"the shortest prompt has only {shortest} tokens",
            field="logprob_start_len",
            value=start,
            remedy="start within the shortest prompt",
        )
    limit = max(1, SCORED_LOGITS // engine.model.vocab_size)
    answers: list[dict[str, Any]] = []
    while part := prompts[len(answers) :]:
        longest = 0
        count = 0
        for prompt in part:
            longest = max(longest, len(prompt))
            if count and (count + 1) * longest > limit:
                break
            count += 1
        scoring = engine.call(partial(Scheduler.score, prompts=part[:count]))
        logprobs, version = await cancel_on_disconnect(request, asyncio.wrap_future(scoring))
        rows = zip(part[:count], logprobs, strict=True)
        answers += [score_answer(prompt, scores, start, version) for prompt, scores in rows]
    return answers


async def update_weights(
    engine: Engine, source: Path | dict[str, Tensor], version: str | None
) -> None:
    """Loads weights once no request runs; see `Scheduler.update_weights`."""
    loaded = engine.call(
        lambda scheduler: scheduler.update_weights(source, version), exclusive=True
    )
    await asyncio.wrap_future(loaded)
