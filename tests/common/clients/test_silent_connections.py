"""Connections on which no answer comes, to a service that is healthy on others."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.clients import base
from common.clients.base import Client, Unreachable
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.settings.config import Config
from common.settings.sections import ReplaySection
from common.wire.schemas import Prompt, TakeRequest
from services.data.app import create_data_app
from services.http.app import create_app, listen, serving
from services.replay.app import create_replay_app
from tests.support.batches.replay_groups import make_group
from tests.support.errors import raises
from tests.support.processes.ports import free_port

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_SILENT_S", 0.2)
    monkeypatch.setattr(base, "_SAY_AFTER_S", 0.4)
    monkeypatch.setattr(base, "_WARN_EVERY_S", 0.1)


Swallow = Callable[[bytes], bool]


class SilentProxy:
    """Forwards connections to a port until a request meets a condition: from then on the requests
    of that connection or, with `answers`, only its answers vanish.
    """

    def __init__(self, port: int, swallow: Swallow, answers: bool) -> None:
        self._port = port
        self._swallow = swallow
        self._answers = answers
        self.silent = 0
        self.connections = set[asyncio.Task[None]]()
        self.clients: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        self.clients.append(writer)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await self._forward(reader, writer, there, back=back)
        finally:
            for each in (back, writer):
                each.close()
                with contextlib.suppress(ConnectionError):
                    await each.wait_closed()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        *,
        back: asyncio.StreamWriter,
    ) -> None:
        is_silent = False

        async def answer() -> None:
            while data := await there.read(1 << 16):
                if not is_silent:
                    writer.write(data)

        answering = asyncio.create_task(answer())
        try:
            while data := await reader.read(1 << 16):
                if not is_silent and self._swallow(data):
                    is_silent = True
                    self.silent += 1
                if not is_silent or self._answers:
                    back.write(data)
        finally:
            answering.cancel()


@asynccontextmanager
async def behind(
    port: int, swallow: Swallow, answers: bool
) -> AsyncIterator[tuple[str, SilentProxy]]:
    proxy = SilentProxy(port, swallow, answers)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", proxy
    finally:
        server.close()
        for writer in proxy.clients:
            writer.close()
        await asyncio.gather(*proxy.connections)


def first_of(path: str, count: int = 1) -> Swallow:
    """Meets the first `count` calls of a path."""
    left = count

    def swallow(request: bytes) -> bool:
        nonlocal left
        if path.encode() not in request.split(b"\r\n", 1)[0] or left == 0:
            return False
        left -= 1
        return True

    return swallow


@pytest.mark.parametrize("answers", [False, True], ids=["requests", "answers"])
@pytest.mark.parametrize("path", ["/groups/take", "/groups/ack", "/stats", "/groups "])
async def test_a_silent_connection_is_given_up_for_another_and_said(
    path: str, answers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_replay_app(ReplaySection(), tmp_path)
    port = free_port()
    async with (
        serving(app, listen("127.0.0.1", port)),
        behind(port, first_of(path), answers) as (url, proxy),
        ReplayClient("replay-buffer", url, deadline_s=300) as client,
    ):
        assert await client.add([make_group("a"), make_group("b")]) in (0, 2)
        taken = await client.take(TakeRequest(count=2, request_id="r"))
        assert [group.id for group in taken.groups] == ["a", "b"]
        await client.ack(["a", "b"])
        assert (await client.stats())["consumed"] == 2
    assert proxy.silent == 1
    told = [getattr(record, "event", {}) for record in caplog.records]
    assert ("waiting", "replay-buffer", "silent") in {
        (each.get("code"), each.get("service"), each.get("problem")) for each in told
    }
    assert "on which it does not work" in caplog.text


async def test_a_cursor_moves_once_although_its_answer_was_lost(tmp_path: Path) -> None:
    prompts = [Prompt(id=f"p{i}", prompt=f"{i}?", ground_truth="1") for i in range(9)]
    app = create_data_app(Config(state_dir=tmp_path), prompts, [])
    port = free_port()
    async with (
        serving(app, listen("127.0.0.1", port)),
        behind(port, first_of("/prompts", 3), answers=True) as (url, proxy),
        DataClient("data-server", url, deadline_s=300) as client,
    ):
        assert (await client.prompts(2, "first")).position == 0
        assert (await client.prompts(2, "second")).position == 2
    assert proxy.silent == 3


async def test_a_call_on_which_the_service_works_is_waited_for_in_one_attempt() -> None:
    app = create_app("slow")
    calls = 0

    @app.post("/work")
    async def work() -> dict[str, str]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(2.0)
        return {"status": "done"}

    port = free_port()
    async with (
        serving(app, listen("127.0.0.1", port)),
        Client("slow", f"http://127.0.0.1:{port}", deadline_s=300) as client,
    ):
        assert (await client.request("POST", "/work")).json() == {"status": "done"}
    assert calls == 1


async def test_a_socket_that_accepts_and_never_answers_is_said_while_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Client("thing", url, deadline_s=7) as client:
            with raises(Unreachable, field="url"):
                await client.request("GET", "/x")
    assert "for thing to answer GET /x; its connection is silent" in caplog.text
