"""Environments for tests, and engines whose answers depend on the prompt."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from common.clients.environment import EnvironmentClient
from common.clients.rollout import RolloutClient
from common.settings.sections import EnvironmentSection, RuntimeSection
from common.wire.schemas import EpisodeLimits, EpisodeRequest, EpisodeSampling, EpisodeTask
from services.environment.app import create_environment_app
from services.environment.environments import Environment
from services.environment.outcome import EnvironmentLost
from services.environment.runners import needs_gateway
from services.environment.service import EpisodeService
from services.environment.template import Template
from services.http.app import listen, serving
from tests.support.models.trap_models import letters, trap_tokenizer

BASE = "http://in-process"


class Calculator:
    """A class that TRL's `environment_factory` accepts."""

    def __init__(self) -> None:
        self.sum: int | None = None
        self.wanted = 0

    def reset(self, **columns: Any) -> str:
        """Begins with a problem."""
        self.wanted = int(columns["ground_truth"])
        return " Use the tool."

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sum = a + b
        return self.sum

    def broken(self) -> str:
        """Raises."""
        raise RuntimeError("out of order")

    def get_reward(self) -> float:
        """Whether the tool found the answer."""
        return float(self.sum == self.wanted)


class Guess:
    """Several turns: the model guesses a number until it is right."""

    closed: ClassVar[list[str]] = []

    def reset(self, ground_truth: str) -> None:
        """Begins."""
        self.wanted = ground_truth
        self.guesses = 0

    def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Judges a guess."""
        self.guesses += 1
        return None if messages[-1]["content"] == self.wanted else "no, higher"

    async def get_reward(self) -> dict[str, float]:
        """Less for more guesses."""
        return {"found": 1.0, "guesses": -0.25 * self.guesses}

    def close(self) -> None:
        """Is always called."""
        self.closed.append(self.wanted)


class Faulty:
    """Fails in the way that `prompt` names."""

    release = threading.Event()
    lives = 0

    def reset(self, prompt: str) -> str:
        """Fails, perhaps."""
        self.mode = prompt
        if prompt == "reset":
            raise ValueError("no such task")
        if prompt == "lost" or (prompt == "lost once" and Faulty.lives == 0):
            Faulty.lives += 1
            raise EnvironmentLost("its machine is gone")
        return ""

    def wait(self) -> str:
        """Hangs."""
        self.release.wait(60)
        return "late"

    def huge(self) -> str:
        """Returns ten megabytes."""
        return "x" * 10_000_000

    def get_reward(self) -> Any:
        """Returns no number."""
        return float("nan") if self.mode == "nan" else 1.0


@dataclass
class AnsweringEngine:
    """Engines behind SGLang's `/generate` that answer a prompt with the letters of a function's
    result."""

    reply: Callable[[str], str]
    tokenizer: Any = field(default_factory=trap_tokenizer)
    asked: list[dict[str, Any]] = field(default_factory=list)
    failures: int = 0
    """Number of coming requests to refuse."""
    waits: Callable[[], object] | None = None
    """Called in a thread before an answer, which waits for it."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/generate")
        async def generate(request: Request) -> Any:
            body = await request.json()
            self.asked.append(body)
            if self.failures:
                self.failures -= 1
                return JSONResponse(
                    {"error": {"code": "engine_failed", "message": "the engine has failed"}}, 500
                )
            if self.waits is not None:
                await asyncio.to_thread(self.waits)
            most = body["sampling_params"]["max_new_tokens"]
            ids = letters(self.tokenizer, self.reply(self.tokenizer.decode(body["input_ids"])))
            finish = "stop"
            for stop in body["sampling_params"].get("stop", []):
                # Engines stop after the first token with which the text has the stop text.
                place = self.tokenizer.decode(ids).find(stop)
                if place >= 0:
                    ids = ids[: place + len(stop)]
            if len(ids) > most:
                ids = ids[:most]
                finish = "length"
            meta = {
                "finish_reason": {"type": finish},
                "weight_version": "3",
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
            }
            return {"text": "", "output_ids": ids, "meta_info": meta}

        return app


@dataclass
class Served:
    """An environment-server in this process."""

    service: EpisodeService
    engine: AnsweringEngine
    client: EnvironmentClient
    http: httpx.AsyncClient
    app: FastAPI


@asynccontextmanager
async def served(
    environment: type | str | Environment,
    reply: Callable[[str], str],
    runtime: RuntimeSection | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serves an environment, given as a class, by name or checked, with engines that answer with
    `reply`.

    A `runtime` names the address to listen at as its gateway, if it cannot be 127.0.0.1."""
    engine = AnsweringEngine(reply)
    own = environment if isinstance(environment, Environment) else None
    if isinstance(environment, type):
        name = f"python:{environment.__module__}:{environment.__name__}"
    else:
        name = environment if isinstance(environment, str) else environment.name
    section = EnvironmentSection(name=name, **settings)
    template = Template(engine.tokenizer, [engine.tokenizer.eos_token_id])
    async with RolloutClient(
        "rollout-server", BASE, transport=httpx.ASGITransport(engine.app())
    ) as router:
        host = runtime.gateway if runtime and runtime.gateway else "127.0.0.1"
        sock = listen(host, 0)
        gateway = f"http://{host}:{sock.getsockname()[1]}"
        if runtime is not None and runtime.gateway:
            runtime.gateway = gateway
        service = EpisodeService(
            section,
            template,
            router,
            stop_token_ids=[engine.tokenizer.eos_token_id],
            gateway=gateway,
            runtime=runtime,
            environment=own,
        )
        app = create_environment_app(service, max_body_bytes=32 << 20)
        transport = httpx.ASGITransport(app)
        async with (
            serving(app, sock) if needs_gateway(section) else app.router.lifespan_context(app),
            EnvironmentClient("environment-server", BASE, transport=transport) as client,
            httpx.AsyncClient(transport=transport, base_url=BASE) as http,
        ):
            yield Served(service, engine, client, http=http, app=app)
            await service.close()
        sock.close()


def request_for(
    environment: str, prompt: str = "1+2?", truth: str = "3", n: int = 1, **limits: Any
) -> EpisodeRequest:
    """Returns a request for n episodes."""
    task = EpisodeTask(env=environment, prompt=prompt, ground_truth=truth)
    sampling = EpisodeSampling(max_new_tokens=300)
    return EpisodeRequest(
        request_id="r1", n=n, task=task, sampling=sampling, limits=EpisodeLimits(**limits)
    )
