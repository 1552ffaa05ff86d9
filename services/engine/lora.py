"""SGLang's calls that load and unload LoRA adapters."""

import asyncio
from pathlib import Path

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from common.errors import ServiceError
from services.engine.bodies import read_body, reply
from services.engine.engine import Engine
from services.http.openapi import OBJECT, described


class UnloadBody(BaseModel):
    """`/unload_lora_adapter`."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str


class LoadBody(UnloadBody):
    """`/load_lora_adapter`."""

    lora_path: str


def add_lora(app: FastAPI, engine: Engine) -> None:
    """Adds the calls."""

    def answer(error: ServiceError | None = None) -> Response:
        message = "" if error is None else str(error)
        body = {"success": error is None, "error_message": message, "loaded_adapters": engine.adapters}
        return reply(body, 200 if error is None else error.status)

    @app.post("/load_lora_adapter", **described(LoadBody, OBJECT, statuses=(200, 400)))
    async def load_lora_adapter(request: Request) -> Response:
        """Makes an adapter known by a name; 400 for a name that is there and for files that do not fit."""
        body = await read_body(request, LoadBody)
        try:
            await asyncio.wrap_future(engine.load_adapter(body.lora_name, Path(body.lora_path)))
        except ServiceError as error:
            return answer(error)
        return answer()

    @app.post("/unload_lora_adapter", **described(UnloadBody, OBJECT, statuses=(200, 400)))
    async def unload_lora_adapter(request: Request) -> Response:
        """Refuses new requests with this adapter, and forgets it when the last one is answered."""
        body = await read_body(request, UnloadBody)
        try:
            await asyncio.wrap_future(engine.retire_adapter(body.lora_name))
            while not await asyncio.wrap_future(engine.drop_adapter(body.lora_name)):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
        except ServiceError as error:
            return answer(error)
        return answer()
