"""What all routes of the engine share: bodies, answers, and waiting for the engine's thread."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from common import Json
from common.errors import InvalidInput, NotReady, ServiceError
from common.process.futures import forgettable
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob
from services.engine.protocol import BadRequest, GenerateBody, bad_request, score_answer
from services.engine.scheduler import Scheduler
from services.http.app import read_json
from services.http.disconnect import cancel_on_disconnect
from services.http.openapi import OBJECT, described

SCORED_LOGITS = 1 << 26
"""Maximum logits in memory when prompts are scored, unless a single prompt has more."""
_B = TypeVar("_B", bound=BaseModel)


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


def reply(content: object, status: int = 200) -> Response:
    """Returns a JSON response, encoded by orjson because answers hold tens of thousands of
    numbers.
    """
    return Response(orjson.dumps(content), status, media_type="application/json")


def add_call(app: FastAPI, path: str, kind: type[_B], work: Callable[[_B], Awaitable[str]]) -> None:
    """Adds a control call, whose answer says whether `work` succeeded, and what it returned or
    raised.
    """

    @app.post(path, description=work.__doc__, **described(kind, OBJECT, statuses=(200, 400)))
    async def call(request: Request) -> Response:
        body = await read_body(request, kind)
        try:
            return reply({"success": True, "message": await work(body)})
        except ServiceError as error:
            if error.status != 400:  # not a refusal: the engine has died, or stops
                raise
            return reply({"success": False, "message": str(error)}, 400)


async def finish(request: Request, engine: Engine, jobs: list[GenerationJob]) -> None:
    """Runs jobs to their end. When the client disconnects, or one job fails, the others are
    aborted.

    Raises the error of a failed job, Overloaded when the queue is full, or ClientGone.
    """
    engine.submit(jobs)
    # A client that disconnects does not ask for its error.
    done = forgettable(asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs)))
    try:
        await cancel_on_disconnect(request, asyncio.shield(done))  # aborted jobs end by themselves
    finally:
        if any(not job.done.done() for job in jobs):
            with contextlib.suppress(NotReady):  # an engine that is down has no rows
                engine.call(
                    lambda scheduler: scheduler.abort(lambda sequence: sequence.job in jobs)
                )


async def score(
    request: Request, engine: Engine, body: GenerateBody, prompts: list[list[int]]
) -> list[Json]:
    """Returns the answers for the log-probabilities of prompts, computed in parts so that running
    rows continue.

    Raises BadRequest when they start beyond the end of a prompt, or ClientGone.
    """
    body.check_scoring(engine.model)
    start = body.logprob_start_len
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) <= start:
        raise BadRequest(
            f"the shortest prompt has only {min(lengths)} tokens",
            field="logprob_start_len",
            value=start,
            remedy="start within the shortest prompt",
        )
    at_once = max(1, SCORED_LOGITS // (engine.model.vocab_size * max(lengths)))
    answers: list[Json] = []
    for first in range(0, len(prompts), at_once):
        part = prompts[first : first + at_once]
        work = partial(
            Scheduler.score,
            prompts=part,
            adapter=body.lora_path,
            top=min(body.top_logprobs_num or 0, engine.model.vocab_size),
            chosen=body.token_ids_logprob or (),
        )
        found, version = await cancel_on_disconnect(request, engine.run(work))
        for prompt, scores in zip(part, found, strict=True):
            answers.append(score_answer(body, prompt, scores, version))
    return answers
