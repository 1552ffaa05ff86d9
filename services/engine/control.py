"""SGLang's control and information calls that this system uses: pause, weights, adapters, load."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from fastapi import FastAPI, Request, Response

from common.errors import NotReady, ServiceError
from common.wire.schemas import AtMost
from services.engine.engine import Engine
from services.engine.requests import Body, read_body, reply, update_weights
from services.engine.scheduler import MemoryKind
from services.http.openapi import OBJECT, described

_RATE_S = 0.5
"""Shortest interval over which the generation rate is measured."""


class PauseBody(Body):
    """`/pause_generation`."""

    mode: Literal["retract"]
    """The only one of SGLang's modes that this system sends."""


class UpdateBody(Body):
    """`/update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None


class UnloadBody(Body):
    """`/unload_lora_adapter`."""

    lora_name: str


class LoadBody(UnloadBody):
    """`/load_lora_adapter`."""

    lora_path: str


class MemoryBody(Body):
    """`/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[list[MemoryKind], AtMost(8)] | None = None
    """Unset: all."""

    @property
    def kinds(self) -> list[MemoryKind]:
        return list(dict.fromkeys(self.tags or get_args(MemoryKind)))


def add_control(app: FastAPI, engine: Engine) -> None:
    """Adds the calls that change the state of the engine."""

    @app.post("/pause_generation", **described(PauseBody, OBJECT))
    async def pause_generation(request: Request) -> Response:
        """Stops generating and queues running requests again."""
        await read_body(request, PauseBody)
        await asyncio.wrap_future(engine.call(lambda scheduler: scheduler.pause()))
        return reply({"message": "Generation paused (retract).", "status": "ok"})

    @app.post("/continue_generation", **described(Body, OBJECT))
    async def continue_generation(request: Request) -> Response:
        """Resumes generating."""
        await read_body(request, Body)
        await asyncio.wrap_future(engine.call(lambda scheduler: scheduler.resume()))
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    @app.post("/update_weights_from_disk", **described(UpdateBody, OBJECT, statuses=(200, 400)))
    async def update_weights_from_disk(request: Request) -> Response:
        """Loads safetensors of the same architecture; 400 when they do not fit, and the old weights
        stay.
        """
        body = await read_body(request, UpdateBody)
        try:
            await update_weights(engine, Path(body.model_path), body.weight_version)
        except ServiceError as error:
            return reply({"success": False, "message": str(error)}, error.status)
        return reply({"success": True, "message": "Succeeded to update model weights."})


def add_memory(app: FastAPI, engine: Engine) -> None:
    """Adds the calls that release the engine's memory for a trainer on the same GPU, and take it
    back.
    """
    answer = {"type": "null"}

    @app.post("/release_memory_occupation", **described(MemoryBody, answer))
    async def release_memory_occupation(request: Request) -> Response:
        """Frees memory while paused or idle; requests wait.

        Released weights are lost: load them again after resuming.
        """
        body = await read_body(request, MemoryBody)
        await asyncio.wrap_future(
            engine.call(lambda scheduler: scheduler.release_memory(body.kinds))
        )
        return reply(None)

    @app.post("/resume_memory_occupation", **described(MemoryBody, answer))
    async def resume_memory_occupation(request: Request) -> Response:
        """Allocates released memory again. The engine stays paused."""
        body = await read_body(request, MemoryBody)
        await asyncio.wrap_future(
            engine.call(lambda scheduler: scheduler.resume_memory(body.kinds))
        )
        return reply(None)


def add_lora(app: FastAPI, engine: Engine) -> None:
    """Adds the calls that load and unload LoRA adapters."""

    async def answer(work: Awaitable[None]) -> Response:
        message = ""
        status = 200
        try:
            await work
        except ServiceError as error:
            message = str(error)
            status = error.status
        loaded = engine.scheduler.adapters.paths()
        return reply(
            {"success": status == 200, "error_message": message, "loaded_adapters": loaded}, status
        )

    async def unload(name: str) -> None:
        await asyncio.wrap_future(engine.call(lambda scheduler: scheduler.retire_adapter(name)))
        while not await asyncio.wrap_future(  # noqa: ASYNC110
            engine.call(lambda scheduler: scheduler.drop_adapter(name))
        ):
            await asyncio.sleep(0.02)

    @app.post("/load_lora_adapter", **described(LoadBody, OBJECT, statuses=(200, 400)))
    async def load_lora_adapter(request: Request) -> Response:
        """Loads an adapter under a name; 400 for a name in use and for files that do not fit."""
        body = await read_body(request, LoadBody)
        work = engine.call(
            lambda scheduler: scheduler.adapters.load(body.lora_name, Path(body.lora_path))
        )
        return await answer(asyncio.wrap_future(work))

    @app.post("/unload_lora_adapter", **described(UnloadBody, OBJECT, statuses=(200, 400)))
    async def unload_lora_adapter(request: Request) -> Response:
        """Refuses new requests for the adapter, and unloads it when the last running one is
        answered.
        """
        body = await read_body(request, UnloadBody)
        return await answer(unload(body.lora_name))


def add_info(app: FastAPI, engine: Engine, arguments: dict[str, Any]) -> None:
    """Adds the calls that change nothing."""

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """200 when the engine generates, 503 while paused. `/health` stays 200, so that routers
        keep the worker.
        """
        if engine.failure is not None:
            raise engine.failure
        if engine.scheduler.paused:
            raise NotReady("generation is paused", remedy="POST /continue_generation")
        return {"status": "ready"}

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """Path and version of the weights, and the kind of model."""
        path = str(engine.model.path)
        return {
            "model_path": path,
            "served_model_name": path,
            "tokenizer_path": engine.model.tokenizer.name_or_path,
            "is_generation": True,
            "weight_version": engine.scheduler.weight_version,
            "model_type": engine.model.config.model_type,
            "architectures": engine.model.module.config.architectures,
            "max_context_tokens": engine.model.max_context_tokens,
            "vocab_size": engine.model.vocab_size,
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """The process's arguments and load."""
        return {
            **arguments,
            "engine": "embedded",
            "version": app.version,
            "tp_size": 1,
            "dp_size": 1,
            "weight_version": engine.scheduler.weight_version,
            "internal_states": [
                {
                    "paused": engine.scheduler.paused,
                    "num_running_reqs": engine.running,
                    "num_waiting_reqs": engine.waiting,
                }
            ],
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model and its LoRA adapters."""
        path = str(engine.model.path)
        shared = {"object": "model", "owned_by": "embedded"}
        card = {
            "id": path,
            "root": path,
            "parent": None,
            "max_model_len": engine.model.max_context_tokens,
            **shared,
        }
        adapters = [
            {"id": name, "root": root, "parent": path, **shared}
            for name, root in engine.scheduler.adapters.paths().items()
        ]
        return {"object": "list", "data": [card, *adapters]}

    counted_at = time.monotonic()
    counted = 0.0
    rate = 0.0

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """The numbers of running and waiting requests, and the tokens per second since the last
        call.
        """
        nonlocal counted_at, counted, rate
        now = time.monotonic()
        tokens = (
            engine.metrics.registry.get_sample_value("rlhf_engine_generated_tokens_total") or 0.0
        )
        if now - counted_at >= _RATE_S:
            rate = (tokens - counted) / (now - counted_at)
            counted_at = now
            counted = tokens
        running = engine.running
        waiting = engine.waiting
        load: dict[str, float] = {"num_running_reqs": running, "num_waiting_reqs": waiting}
        load |= {"dp_rank": 0, "num_total_reqs": running + waiting, "gen_throughput": rate}
        return {
            "timestamp": time.time(),
            "version": app.version,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": load,
        }
