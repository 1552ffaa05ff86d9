"""The engine's HTTP API: the SGLang calls that this system uses, with SGLang's fields and statuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from common.errors import ServiceError
from services.engine.control import add_control, add_info, add_lora
from services.engine.distributed import add_distributed
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, Sequence
from services.engine.openai import ChatBody, CompletionBody, chat_answer, completion_answer
from services.engine.protocol import GenerateBody, answer
from services.engine.requests import abort_unfinished, all_done, finish, make_jobs, read_body, reply
from services.http.app import create_app
from services.http.openapi import JSON, OBJECT, described


def make_app(engine: Engine, arguments: dict[str, Any] | None = None) -> FastAPI:
    """Returns the app of an engine; the app starts and stops it. `/server_info` shows the process's `arguments`."""

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:  # a thread that still computes at interpreter exit aborts the process
            await asyncio.to_thread(engine.stop)

    app = create_app(
        "rollout-engine",
        not_ready=lambda: engine.failure,
        lifespan=lifespan,
        metrics=engine.metrics,
        max_requests=engine.max_waiting + 1024,  # the queue bounds generation; agents need some more
        fails=(400,),
    )
    add_control(app, engine)
    add_distributed(app, engine)
    add_lora(app, engine)
    add_info(app, engine, arguments or {})

    generated = {"anyOf": [OBJECT, {"type": "array", "items": OBJECT}]}
    described_generate = described(GenerateBody, generated, writes=(JSON, "text/event-stream"))

    @app.post("/generate", **described_generate)
    @app.put("/generate", **described_generate)
    async def generate(request: Request) -> Response:
        """SGLang's native call on token ids. One prompt with n = 1 gives an object, anything else a list."""
        body = await read_body(request, GenerateBody)
        jobs = await make_jobs(request, body.jobs, engine.model)
        if body.stream:
            return _stream(engine, jobs)
        await finish(request, engine, jobs)
        found = [answer(sequence, engine.model.tokenizer) for job in jobs for sequence in job.sequences]
        return reply(found if body.is_batch or len(found) > 1 else found[0])

    @app.post("/v1/completions", **described(CompletionBody, OBJECT))
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        body = await read_body(request, CompletionBody)
        jobs = await make_jobs(request, body.jobs, engine.model)
        await finish(request, engine, jobs)
        return reply(completion_answer(jobs, engine.model))

    @app.post("/v1/chat/completions", **described(ChatBody, OBJECT))
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions, through the tokenizer's chat template."""
        body = await read_body(request, ChatBody)
        jobs = await make_jobs(request, body.jobs, engine.model)
        await finish(request, engine, jobs)
        return reply(chat_answer(jobs, engine.model))

    return app


def _stream(engine: Engine, jobs: list[GenerationJob]) -> StreamingResponse:
    """Returns server-sent events, one per token and sequence, each with the whole text so far; `[DONE]` at the end.

    Raises Overloaded before the first event when the queue is full; a later failure is an event with `error`.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def on_token(sequence: Sequence) -> None:
        place = [each for job in jobs for each in job.sequences].index(sequence)
        event = answer(sequence, engine.model.tokenizer) | {"index": place}
        loop.call_soon_threadsafe(events.put_nowait, event)

    for job in jobs:
        job.on_token = on_token
    engine.submit(jobs)
    done = all_done(jobs)
    done.add_done_callback(lambda _: events.put_nowait(None))

    async def body() -> AsyncIterator[bytes]:
        try:
            while (event := await events.get()) is not None:
                yield b"data: " + orjson.dumps(event) + b"\n\n"
            try:
                await done
            except ServiceError as error:
                yield b"data: " + orjson.dumps(error.body()) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            done.cancel()
            abort_unfinished(engine, jobs)

    return StreamingResponse(body(), media_type="text/event-stream")
