"""SGLang's control and information calls that this system uses: pause, memory, weights from disk,
adapters, load.
"""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Literal, get_args

from fastapi import FastAPI
from prometheus_client import Counter

from common import Json
from common.wire.schemas import AtMost
from services.engine.engine import Engine
from services.engine.requests import Body, add_call
from services.engine.scheduler import MemoryKind, Scheduler

_RATE_S = 0.5
"""Shortest interval over which the generation rate is measured."""


class PauseBody(Body):
    """The body of `/pause_generation`."""

    mode: Literal["retract"]
    """The only one of SGLang's modes that this system sends."""


class UpdateBody(Body):
    """The body of `/update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None


class UnloadBody(Body):
    """The body of `/unload_lora_adapter`."""

    lora_name: str


class LoadBody(UnloadBody):
    """The body of `/load_lora_adapter`."""

    lora_path: str


class MemoryBody(Body):
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[list[MemoryKind], AtMost(8)] | None = None
    """Unset: all."""

    @property
    def kinds(self) -> list[MemoryKind]:
        return list(dict.fromkeys(self.tags or get_args(MemoryKind)))


class Control:
    """The calls that change the state of the engine, on its thread between two steps.

    Each returns the message of the answer, and raises ServiceError for a refusal.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def pause(self, _: PauseBody) -> str:
        """Stops generating and queues running requests again."""
        await self._engine.run(Scheduler.pause)
        return "Generation paused (retract)."

    async def resume(self, _: Body) -> str:
        """Resumes generating."""
        await self._engine.run(Scheduler.resume)
        return "Generation continued successfully."

    async def update_weights(self, body: UpdateBody) -> str:
        """Loads safetensors of the same architecture; 400 when they do not fit, and the old weights
        stay.
        """
        path = Path(body.model_path)
        await self._engine.run(
            lambda scheduler: scheduler.update_weights(path, body.weight_version), exclusive=True
        )
        return "Succeeded to update model weights."

    async def release_memory(self, body: MemoryBody) -> str:
        """Frees memory, for a trainer on the same GPU, while paused or idle; requests wait.

        Released weights are lost: load them again after resuming.
        """
        await self._engine.run(lambda scheduler: scheduler.release_memory(body.kinds))
        return "Memory released."

    async def resume_memory(self, body: MemoryBody) -> str:
        """Allocates released memory again. The engine stays paused."""
        await self._engine.run(lambda scheduler: scheduler.resume_memory(body.kinds))
        return "Memory allocated."

    async def load_adapter(self, body: LoadBody) -> str:
        """Loads an adapter under a name; 400 for a name in use and for files that do not fit."""
        path = Path(body.lora_path)
        await self._engine.run(lambda scheduler: scheduler.adapters.load(body.lora_name, path))
        return f"Loaded {body.lora_name}."

    async def unload_adapter(self, body: UnloadBody) -> str:
        """Refuses new requests for the adapter, and unloads it when the last running one is
        answered.
        """
        name = body.lora_name
        await self._engine.run(lambda scheduler: scheduler.retire_adapter(name))
        # Requests that name it keep it to their end, in the batch or in the queue.
        while not await self._engine.run(  # noqa: ASYNC110
            lambda scheduler: scheduler.drop_adapter(name)
        ):
            await asyncio.sleep(0.02)
        return f"Unloaded {name}."


def add_control(app: FastAPI, engine: Engine) -> None:
    """Adds the calls that change the state of the engine."""
    control = Control(engine)
    add_call(app, "/pause_generation", PauseBody, control.pause)
    add_call(app, "/continue_generation", Body, control.resume)
    add_call(app, "/update_weights_from_disk", UpdateBody, control.update_weights)
    add_call(app, "/release_memory_occupation", MemoryBody, control.release_memory)
    add_call(app, "/resume_memory_occupation", MemoryBody, control.resume_memory)
    add_call(app, "/load_lora_adapter", LoadBody, control.load_adapter)
    add_call(app, "/unload_lora_adapter", UnloadBody, control.unload_adapter)


def add_info(app: FastAPI, engine: Engine) -> None:
    """Adds the calls that change nothing."""

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Json:
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
    async def server_info() -> Json:
        """The kind of engine, and whether it is paused."""
        return {
            "engine": "embedded",
            "model_path": str(engine.model.path),
            "version": app.version,
            "tp_size": 1,
            "dp_size": 1,
            "weight_version": engine.scheduler.weight_version,
            "internal_states": [{"paused": engine.scheduler.paused}],
        }

    @app.get("/v1/models")
    async def models() -> Json:
        """The model and its LoRA adapters."""
        path = str(engine.model.path)
        shared = {"object": "model", "max_model_len": engine.model.max_context_tokens}
        cards = [{"id": path, "root": path, "parent": None, **shared}]
        for name, root in engine.scheduler.adapters.paths().items():
            cards.append({"id": name, "root": root, "parent": path, **shared})
        return {"object": "list", "data": cards}

    counted_at = time.monotonic()
    counted = 0.0
    rate = 0.0

    @app.get("/v1/loads")
    async def loads() -> Json:
        """The numbers of running and waiting requests, and the tokens per second since the last
        call.
        """
        nonlocal counted_at, counted, rate
        now = time.monotonic()
        tokens = _total(engine.scheduler.generated)
        if now - counted_at >= _RATE_S:
            rate = (tokens - counted) / (now - counted_at)
            counted_at = now
            counted = tokens
        running = engine.running
        waiting = engine.waiting
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "max_running_requests": engine.scheduler.max_running,
            "gen_throughput": rate,
            "computed_tokens": tokens + _total(engine.scheduler.prefilled),
        }
        return {
            "timestamp": time.time(),
            "version": app.version,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": load,
        }


def _total(counter: Counter) -> float:
    """Returns the value of a counter. The registry would collect all metrics to find it."""
    (metric,) = counter.collect()
    return metric.samples[0].value
