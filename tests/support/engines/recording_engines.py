"""Engines that record every request and answer at once."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import FastAPI, Request

from common.process.logs import REQUEST_HEADER
from trainer.backends.server import BackgroundServer


class Recorder:
    """An engine that records every request and answers at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.other: list[str] = []
        self.ids: list[str | None] = []
        self.app = FastAPI()
        for path in ("/health", "/server_info", "/model_info", "/v1/loads"):
            self.app.get(path)(self.info)
        self.app.get("/v1/models")(self.models)
        self.app.post("/generate")(self.generate)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/{path:path}")(self.anything)

    async def info(self) -> dict[str, Any]:
        return {"model_path": "/m", "served_model_name": "m", "is_generation": True}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "test"}]}

    async def generate(self, request: Request) -> list[dict[str, Any]]:
        body = await request.json()
        self.bodies.append(body)
        self.ids.append(request.headers.get(REQUEST_HEADER))
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.1, 1, None]],
            "weight_version": "7",
        }
        if body.get("lora_path"):
            meta["weight_version"] = "default"
        prompts = len(body["input_ids"]) if isinstance(body["input_ids"][0], list) else 1
        return [{"text": "x", "output_ids": [1], "meta_info": meta}] * (
            prompts * body["sampling_params"].get("n", 1)
        )

    async def chat(self, request: Request) -> dict[str, Any]:
        self.bodies.append(await request.json())
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "stop",
        }
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
        }

    async def anything(self, path: str) -> dict[str, Any]:
        self.other.append(path)
        return {}


@contextmanager
def recorders(count: int) -> Iterator[tuple[list[Recorder], list[str]]]:
    """Serves `count` engines over sockets; yields them and their URLs."""
    with ExitStack() as stack:
        made = [Recorder() for _ in range(count)]
        servers = [stack.enter_context(BackgroundServer(each.app, "127.0.0.1", 0)) for each in made]
        yield made, [f"http://127.0.0.1:{server.port}" for server in servers]
