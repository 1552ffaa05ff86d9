"""An engine that answers its probes and does not generate is killed and started again."""

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.clients.rollout import RolloutClient
from services.rollout.engine_client import EngineClient
from services.rollout.generation import GenerationProbe
from services.rollout.supervision import SupervisedProcess, Timing
from tests.support.engines.modelled_engine import speed
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port

LIMIT_S = 0.4
ONE: dict[str, Any] = {"n": 1, "max_new_tokens": 40, "temperature": 1.0, "stop_token_ids": []}


class Scripted:
    """An engine whose load a test sets."""

    def __init__(self) -> None:
        self.load: dict[str, int] | None = {"num_running_reqs": 0, "num_waiting_reqs": 0}
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/loads":
            if self.load is None:
                raise httpx.ReadTimeout("its scheduler does not answer")
            return httpx.Response(self.status, json={"loads": [self.load]})
        return httpx.Response(200, json={})

    async def verdict(
        self, client: EngineClient, advance: int = 0, for_s: float = 3 * LIMIT_S
    ) -> str | None:
        """Returns what a probe says that looks for so long, or until it says something."""
        probe = GenerationProbe(client, LIMIT_S, lambda: client.is_paused)
        until = time.monotonic() + for_s
        while (said := await probe()) is None and time.monotonic() < until:
            await asyncio.sleep(LIMIT_S / 10)
            if self.load is not None and advance:
                self.load["num_used_tokens"] = self.load.get("num_used_tokens", 0) + advance
        return said


@pytest.mark.parametrize(
    ("load", "advance", "is_hung"),
    [
        ({"num_running_reqs": 0, "num_waiting_reqs": 0}, 0, False),
        ({"num_running_reqs": 3, "num_waiting_reqs": 2}, 0, True),
        ({"num_running_reqs": 0, "num_waiting_reqs": 2}, 0, True),
        ({"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 7}, 1, False),
        (None, 0, True),
        ({"other": 1}, 0, False),  # a server that does not say
    ],
)
async def test_an_engine_is_unhealthy_that_has_requests_and_computes_nothing(
    load: dict[str, int] | None, advance: int, is_hung: bool
) -> None:
    scripted = Scripted()
    scripted.load = load
    transport = httpx.MockTransport(scripted)
    async with EngineClient("engine", "http://engine", transport=transport) as client:
        # A machine that is busy delays the verdict on an engine that hangs.
        for_s = 60.0 if is_hung else 3 * LIMIT_S
        said = await scripted.verdict(client, advance, for_s)
        assert (said is not None) == is_hung
        if load and is_hung:
            assert said is not None
            assert "2 wait" in said


async def test_a_paused_engine_is_healthy() -> None:
    scripted = Scripted()
    scripted.load = {"num_running_reqs": 0, "num_waiting_reqs": 2}
    transport = httpx.MockTransport(scripted)
    async with EngineClient("engine", "http://engine", transport=transport) as client:
        await client.pause()
        assert await scripted.verdict(client) is None
        await client.resume()
        assert await scripted.verdict(client) is not None


@pytest.mark.integration
async def test_a_hung_engine_is_restarted_and_its_requests_are_answered(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    module = "benchmarks.true_size.stand_in.sglang.launch_server"
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)]
    env = {"TRUE_SIZE": json.dumps(dataclasses.asdict(speed(4))), "PYTHONPATH": str(ROOT)}
    ends: list[str] = []

    async def launch() -> list[str]:
        return command

    async with (
        EngineClient("engine", url) as api,
        RolloutClient("rollout-server", url, deadline_s=60) as client,
    ):
        engine = SupervisedProcess(
            "engine",
            launch,
            GenerationProbe(api, 2.0, lambda: api.is_paused),
            env={**os.environ, **env},
            log_file=tmp_path / "engine.log",
            timing=Timing(probe_s=0.1, hang_s=0.5, first_backoff_s=0.01, max_backoff_s=0.02),
            on_down=ends.append,
        )
        running = asyncio.create_task(engine.run())
        try:
            await client.answers([1], **ONE)
            # Behind the back of the probe: the HTTP server goes on, the scheduler does not.
            await client.http.post("/pause_generation", json={})
            await client.answers([1], **ONE)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert engine.starts == 2
    assert "generates nothing" in ends[0]
