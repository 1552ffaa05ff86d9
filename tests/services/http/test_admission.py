"""A service accepts a bounded load, refuses the rest cheaply, and stays observable and healthy
meanwhile."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI, Request

from common.clients.base import Client
from services.http.app import create_app
from tests.support.paths import ROOT
from tests.support.processes.load import held, metric
from tests.support.processes.ports import free_port

SERVICE = """
import asyncio, sys
from fastapi import Request
from services.http.app import create_app, serve
app = create_app("busy-server", max_body_bytes=1000, max_requests=4)
gate = asyncio.Event()

@app.post("/hold")
async def hold(request: Request) -> dict[str, int]:
    size = len(await request.body())
    while not gate.is_set() and not await request.is_disconnected():
        await asyncio.sleep(0.01)
    return {"size": size}

@app.post("/open")
async def open_gate() -> None:
    gate.set()

serve(app, "127.0.0.1", int(sys.argv[1]))
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Yields the port of a real process that accepts four requests and four of the largest bodies
    at once."""
    found = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVICE, str(found)], cwd=ROOT)
    yield found
    process.kill()
    process.wait()


@pytest.fixture
async def client(port: int) -> AsyncIterator[Client]:
    async with Client("busy-server", f"http://127.0.0.1:{port}", deadline_s=400) as made:
        await made.request("GET", "/health")
        yield made


@pytest.mark.integration
async def test_requests_beyond_the_limit_are_refused_and_the_service_stays_visible(
    client: Client,
) -> None:
    first = [
        asyncio.create_task(client.http.post("/hold", content=b"x" * 100, timeout=400))
        for _ in range(4)
    ]
    await held(client, "requests_in_progress", 4)
    answers = await asyncio.gather(
        *(client.http.post("/hold", content=b"x" * 900, timeout=400) for _ in range(20))
    )
    assert {answer.status_code for answer in answers} == {503}
    error = answers[0].json()["error"]
    assert (error["code"], error["field"], error["value"]) == ("overloaded", "requests", "4")
    assert answers[0].headers["retry-after"] == "1"
    assert error["remedy"] == "try again later"
    assert (await client.http.get("/health", timeout=60)).status_code == 200
    assert await metric(client, 'requests_refused_total{limit="requests"}') == 20
    assert await metric(client, "requests_in_progress_limit") == 4
    assert await metric(client, "request_bodies_bytes") == 400
    for task in first[:1]:  # a client that disconnects frees its place
        task.cancel()
    await client.request("POST", "/open")  # refused until then, so the client retries
    for answer in await asyncio.gather(*first[1:]):
        assert answer.json() == {"size": 100}
    assert (await client.request("POST", "/hold", content=b"y")).json() == {"size": 1}
    await held(client, "requests_in_progress", 0)
    await held(client, "request_bodies_bytes", 0)


@pytest.mark.integration
async def test_refusal_does_not_wait_for_the_body(client: Client, port: int) -> None:
    """The answer arrives before a byte of the body is sent."""
    tasks = [asyncio.create_task(client.http.post("/hold", timeout=400)) for _ in range(4)]
    await held(client, "requests_in_progress", 4)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /hold HTTP/1.1\r\nhost: localhost\r\nx-request-id: a\r\ncontent-length: 1000\r\n\r\n"
    )
    status = await asyncio.wait_for(reader.readline(), 400)
    assert status.split()[1] == b"503"
    writer.close()
    for task in tasks:
        task.cancel()


@pytest.mark.integration
@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_client_that_sends_all_of_a_body_first_reads_why_it_was_refused(
    port: int, client: Client, is_announced: bool
) -> None:
    """httpx reads no answer before: a connection that is closed meanwhile is an error without a
    reason.
    """

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(512):
            yield b" " * (1 << 16)

    content = b" " * (32 << 20) if is_announced else pieces()
    async with httpx.AsyncClient(headers={"x-request-id": "a"}, timeout=400) as http:
        answer = await http.post(f"http://127.0.0.1:{port}/hold", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (413, "too_large", "body")
    assert int(error["value"]) == 32 << 20 if is_announced else int(error["value"]) > 1000
    assert "max_body_mb" in error["remedy"]


def in_process(app: FastAPI) -> httpx.AsyncClient:
    headers = {"x-request-id": "a"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://thing", headers=headers
    )


@pytest.fixture
def gate() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def app(gate: asyncio.Event) -> FastAPI:
    app = create_app("thing", max_body_bytes=1000, max_requests=100)

    @app.post("/hold")
    async def hold(request: Request) -> dict[str, int]:
        size = len(await request.body())
        await gate.wait()
        return {"size": size}

    return app


async def chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b" " * 100


async def test_bytes_of_bodies_are_bounded_by_length_and_as_they_stream_in(
    app: FastAPI, gate: asyncio.Event
) -> None:
    async with in_process(app) as http:
        tasks = [asyncio.create_task(http.post("/hold", content=b"x" * 1000)) for _ in range(3)]
        tasks.append(asyncio.create_task(http.post("/hold", content=chunks(600))))
        async with asyncio.timeout(400):
            while app.state.load.body_bytes < 3600:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for content in (b"x" * 401, chunks(500)):
            answer = await http.post("/hold", content=content)
            assert (answer.status_code, answer.json()["error"]["field"]) == (503, "body_bytes")
            assert answer.headers["retry-after"] == "1"
        small = asyncio.create_task(http.post("/hold", content=b"x" * 400))
        gate.set()
        assert [(await task).json()["size"] for task in (*tasks, small)] == [
            1000,
            1000,
            1000,
            600,
            400,
        ]
    assert app.state.load.stats() == {
        "request_limit": 100,
        "body_bytes_limit": 4000,
        "requests": 0,
        "body_bytes": 0,
        "refused": 2,
    }
