"""At the end of a run every service is flushed; a missing service does not make the run fail."""

import logging
from functools import partial

import httpx
import pytest

from common.clients.base import Client
from services.http.app import create_app
from tests.support.processes.ports import free_port
from trainer.rollouts.services import flush_all


async def test_a_service_that_is_gone_is_named_and_the_others_are_flushed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flushed: list[str] = []
    apps = [
        create_app(name, flush=partial(flushed.append, name))
        for name in ("data-server", "replay-buffer")
    ]
    there = [
        Client(app.title, "http://service", transport=httpx.ASGITransport(app)) for app in apps
    ]
    gone = Client("rollout-server-1", f"http://127.0.0.1:{free_port()}")
    clients = [there[0], gone, there[1]]
    with caplog.at_level(logging.WARNING, logger="trainer.rollouts.services"):
        await flush_all(clients, deadline_s=5)
    assert flushed == ["data-server", "replay-buffer"]
    assert "rollout-server-1 was not flushed" in caplog.text
    for client in clients:
        await client.close()
