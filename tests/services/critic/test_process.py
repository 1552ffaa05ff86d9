"""The real process: killed and restarted, called while it computes, and started with a missing
model."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from common.clients.base import wait_healthy
from common.clients.critic import CriticClient
from common.errors import ServiceError
from tests.support.batches.critic import Start, make_rows, make_sequences
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration


def client_of(port: int) -> CriticClient:
    return CriticClient("critic-server", f"http://127.0.0.1:{port}", deadline_s=120)


async def test_critic_reports_a_kill_9_and_continues_from_its_checkpoint(
    start: Start, port: int
) -> None:
    process = start()
    async with client_of(port) as client:
        await client.restore("a", 0)  # the client waits for the start
        for step in range(2):
            await client.update("a", step, seed=step, rows=make_rows(6, seed=step))
        await client.save("a", 2, keep=1)
        saved = await client.values(make_sequences(5))
        third = await client.update("a", 2, seed=2, rows=make_rows(6, seed=2))
        process.kill()
        process.wait()
        start()
        with pytest.raises(ServiceError, match="not at step") as error:
            await client.update("a", 3, seed=3, rows=make_rows(6, seed=3))
        assert error.value.status == 409
        assert (await client.restore("b", 2, saved_by="a")).step == 2
        for now, then in zip(await client.values(make_sequences(5)), saved, strict=True):
            assert np.array_equal(now, then)
        again = await client.update("b", 2, seed=2, rows=make_rows(6, seed=2))
        assert asdict(again) == pytest.approx(
            asdict(third), rel=1e-5
        )  # two processes may round differently


async def test_health_answers_while_it_computes(start: Start, port: int) -> None:
    process = start()
    async with client_of(port) as client:
        await wait_healthy([client], 400)
        await client.restore("a", 0)
        update = asyncio.create_task(client.update("a", 0, seed=0, rows=make_rows(2000)))
        answers = 0
        while not update.done():
            assert await client.unhealthy_reason() is None
            answers += 1
        assert answers > 1
        await update
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 400) in (0, -signal.SIGTERM)


def test_missing_model_ends_the_process_with_2_and_its_name(port: int, settings: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "services.critic",
        *settings,
        "--critic.port",
        str(port),
        "--critic.model",
        "/nowhere",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 2
    assert "field: critic.model · value: /nowhere" in ended.stderr
