"""The engine's HTTP API: the SGLang calls that this system uses, with SGLang's fields and
statuses.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from itertools import chain

from fastapi import FastAPI, Request, Response

from services.engine.control import add_control, add_info
from services.engine.distributed import add_distributed
from services.engine.engine import Engine
from services.engine.protocol import GenerateBody, answer
from services.engine.requests import finish, read_body, reply, score
from services.http.app import SMALL_BYTES, create_app
from services.http.openapi import OBJECT, described


def make_app(engine: Engine) -> FastAPI:
    """Returns the app of an engine, which starts and stops the engine."""

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:  # a thread still computing at interpreter exit would abort the process
            await asyncio.to_thread(engine.stop)

    app = create_app(
        "rollout-engine",
        not_ready=lambda: engine.failure,
        lifespan=lifespan,
        metrics=engine.metrics,
        # The queue bounds generation; agents need some more.
        max_requests=engine.max_waiting + 1024,
        fails=(400,),
        # a step makes many requests, and every line passes through the agent's pipe
        access_level=logging.DEBUG,
    )
    generated = {"anyOf": [OBJECT, {"type": "array", "items": OBJECT}]}

    @app.post("/generate", **described(GenerateBody, generated))
    async def generate(request: Request) -> Response:
        """SGLang's native call on token ids. One prompt with n = 1 gives an object, anything else a
        list.
        """
        body = await read_body(request, GenerateBody)
        if len(await request.body()) < SMALL_BYTES:
            prompts = body.prompts(engine.model)
        else:  # tokenising and checking them would hold up the other requests
            prompts = await asyncio.to_thread(body.prompts, engine.model)

        if body.scores_prompts:
            answers = await score(request, engine, body, prompts)
        else:
            jobs = body.jobs(prompts, engine.model)
            await finish(request, engine, jobs)
            sequences = chain.from_iterable(job.sequences for job in jobs)
            answers = [answer(sequence, engine.model.tokenizer) for sequence in sequences]
        return reply(answers if body.is_batch or len(answers) > 1 else answers[0])

    # Routes are looked up in their order, and /generate is called most.
    add_control(app, engine)
    add_distributed(app, engine)
    add_info(app, engine)
    return app
