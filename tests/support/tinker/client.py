"""A client of a Tinker server whose models are stand-ins."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support.tinker.stand_ins import BASE, CountingLearner, EchoEngine, make_server
from trainer.tinker.app import create_tinker_app
from trainer.tinker.clients import Clients
from trainer.tinker.messages import MESSAGES


class Client:
    """A client that sends what the SDK sends."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.session = ""

    async def post(self, call: str, **body: Any) -> dict[str, Any]:
        response = await self.http.post(f"/api/v1/{call}", json=body)
        assert response.is_success, response.text
        found: dict[str, Any] = response.json()
        return found

    async def run(self, number: int = 0, **lora: Any) -> str:
        if not self.session:
            self.session = (await self.post("create_session", tags=[]))["session_id"]
        config = {"rank": 4, "seed": 3, **lora}
        made = await self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=BASE,
            lora_config=config,
        )
        answer = await self.result(made["request_id"])
        return str(answer.json()["model_id"])

    async def sampler_of_base(self) -> str:
        self.session = (await self.post("create_session", tags=[]))["session_id"]
        made = await self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=0,
            base_model=BASE,
        )
        return str(made["sampling_session_id"])

    async def passes(self, run: str, seq: int, token: int = 5, loss: str = "cross_entropy") -> str:
        tokens = np.array([token], "<i4").tobytes()
        data = [{"model_input": [{"text": {"tokens": tokens}}]}]
        body = MESSAGES.encode("Pass", {"run": run, "seq": seq, "data": data, "loss": loss})
        response = await self.http.post(
            "/api/v1/forward_backward",
            content=body,
            headers={"content-type": "application/x-protobuf"},
        )
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    async def step(self, run: str, seq: int) -> str:
        adam = {"learning_rate": 0.5}
        made = await self.post("optim_step", model_id=run, seq_id=seq, adam_params=adam)
        return str(made["request_id"])

    async def result(self, request_id: str) -> httpx.Response:
        return await self.http.post("/api/v1/retrieve_future", json={"request_id": request_id})


@asynccontextmanager
async def serving(
    directory: Path, learner: CountingLearner, engine: EchoEngine, **options: Any
) -> AsyncIterator[Client]:
    """Runs a server with stand-ins for its models; yields a client of it."""
    env = options.pop("env", {})
    key = options.pop("key", "")
    server = make_server(directory, learner, engine, **options)
    app = create_tinker_app(server, Clients(env), BASE, server.running)
    headers = {"x-api-key": key} if key else {}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=headers
        ) as http,
    ):
        yield Client(http)


@asynccontextmanager
async def with_key(client: Client, key: str) -> AsyncIterator[Client]:
    """Yields a client of the same server with another key."""
    async with httpx.AsyncClient(
        transport=client.http._transport,
        base_url=client.http.base_url,
        headers={"x-api-key": key},
    ) as http:
        yield Client(http)
