"""The processes of a chaos run of episodes: an engine that fails by order, and an environment-server."""

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.settings.sections import EnvironmentSection
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from services.environment.template import Template
from services.http.app import serve
from tests.chaos.episodes.swallows import NUMBERS, UNIT, note, ordered
from tests.support.models.trap_models import letters, trap_tokenizer

LOG = "CHAOS_LOG"
ORDERS = "CHAOS_ORDERS"
"""Variables of the environment-server: where its class notes what it saw, and its orders."""
SLOW_S = 4.0
"""Longer than the programs wait."""
_LOOK = '"name": "look"'
_RESULT = "<tool_response>"


def serve_engine(port: int, log: str) -> None:
    """Stands in for router and engines; notes every answer, whose text is unique, with its fault.

    `POST /fault` orders the faults of the next calls.
    """
    tokenizer = trap_tokenizer()
    faults: list[str] = []

    async def order(request: web.Request) -> web.Response:
        body = await request.json()
        faults.extend([body["kind"]] * body["count"])
        return web.json_response({})

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = tokenizer.decode(body["input_ids"])
        text = str(random.randrange(10**11, 10**12))
        if _LOOK in prompt and _RESULT not in prompt:
            call = orjson.dumps({"name": "look", "arguments": {"what": text}}).decode()
            text = f"<tool_call>\n{call}\n</tool_call>"
        fault = faults.pop(0) if faults else ""
        ids = letters(tokenizer, text)
        note(Path(log), {"text": text, "tokens": ids, "fault": fault})
        await asyncio.sleep(random.uniform(0.02, 0.2))
        if fault in ("500", "503"):
            return web.json_response(
                {"error": {"code": "failed", "message": "out of order"}}, status=int(fault)
            )
        if fault in ("hang", "slow"):
            await asyncio.sleep(3600 if fault == "hang" else SLOW_S)
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        content = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        if fault == "half":
            response = web.StreamResponse(headers={"content-type": "application/json"})
            response.content_length = len(content)
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=content, content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    app.router.add_post("/fault", order)
    app.router.add_get("/health", health)
    web.run_app(
        app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True
    )


def serve_environment(name: str, port: int, engine: int) -> None:
    """Serves an environment whose model is behind the port `engine`."""
    tokenizer = trap_tokenizer()
    stop = tokenizer.eos_token_id
    service = EpisodeService(
        EnvironmentSection(name=name),
        Template(tokenizer, [stop]),
        RolloutClient("rollout-server", f"http://127.0.0.1:{engine}"),
        stop_token_ids=[stop],
        metrics=Metrics("environment-server"),
        gateway=f"http://127.0.0.1:{port}",
    )
    serve(create_environment_app(service), "127.0.0.1", port)


class Swallows:
    """A class whose tool catches everything, and fails by order in ways that cannot be caught."""

    def reset(self, prompt: str) -> None:
        """Begins."""
        self.number = random.randrange(NUMBERS)
        self.calls: list[dict[str, Any]] = []

    def look(self, what: str) -> str:
        """Looks something up.

        Args:
            what: To be looked up.
        """
        orders = Path(os.environ[ORDERS])
        self.calls.append({"text": what, "error": None})
        if ordered(orders, "tool-hangs"):
            time.sleep(60)
        if ordered(orders, "tool-cancelled"):
            raise asyncio.CancelledError
        if ordered(orders, "tool-surrogate"):
            return "half a pair: \ud800"
        try:
            raise OSError("nothing there")
        except Exception:
            return "nothing"

    def get_reward(self) -> dict[str, float]:
        """Is a point for each call."""
        note(Path(os.environ[LOG]), {"number": self.number, "calls": []})
        return {"score": float(len(self.calls)), "number": self.number * UNIT}
