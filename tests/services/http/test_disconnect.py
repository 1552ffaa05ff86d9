"""Work for a disconnected client, or in a stopping service, is cancelled; other work is
finished."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request

from common.errors import InvalidInput, NotReady, ServiceError
from services.http.app import create_app, listen, serving
from services.http.disconnect import ClientGone, cancel_on_disconnect

Handler = Callable[[Request], Awaitable[str]]


class Work:
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = False

    async def run(self) -> str:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True
        return "never"


@asynccontextmanager
async def served(handle: Handler) -> AsyncIterator[tuple[FastAPI, int]]:
    """Serves `/` over a real socket; yields the app and its port."""
    app = create_app("test")

    @app.get("/")
    async def answer(request: Request) -> str:
        return await handle(request)

    sock = listen("127.0.0.1", 0)
    async with serving(app, sock):
        yield app, sock.getsockname()[1]


def ask(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    return client


async def test_work_ends_with_its_result_or_its_error() -> None:
    async def finish(request: Request) -> str:
        return await cancel_on_disconnect(request, asyncio.sleep(0, "done"), drain=True)

    async def refuse(request: Request) -> str:
        async def work() -> str:
            raise InvalidInput("no")

        return await cancel_on_disconnect(request, work())

    async with served(finish) as (_, port), httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.1:{port}/")).json() == "done"
        assert (await http.get(f"http://127.0.0.1:{port}/")).json() == "done", "kept alive"
    async with served(refuse) as (_, port), httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.1:{port}/")).status_code == 422


@pytest.mark.parametrize("leaves_first", [False, True], ids=["while it runs", "before it begins"])
async def test_work_is_cancelled_when_its_client_has_gone(leaves_first: bool) -> None:
    work = Work()
    asked = asyncio.Event()
    left = asyncio.Event()
    ended: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()

    async def handle(request: Request) -> str:
        asked.set()
        if leaves_first:
            await left.wait()
        try:
            return await cancel_on_disconnect(request, work.run())
        except ClientGone as error:
            ended.set_result(error)
            raise

    async with served(handle) as (_, port):
        client = ask(port)
        await (asked if leaves_first else work.started).wait()
        client.close()
        await asyncio.sleep(0.1)
        left.set()
        error = await ended
    assert (error.status, work.cancelled) == (499, True)


async def test_work_of_a_request_in_the_same_process_runs_to_its_end() -> None:
    app = FastAPI()

    @app.get("/")
    async def answer(request: Request) -> str:
        return await cancel_on_disconnect(request, asyncio.sleep(0, "done"))

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://in-process") as http:
        assert (await http.get("/")).json() == "done"


async def test_stopping_service_cancels_only_work_that_allows_it() -> None:
    short = Work()
    longer = Work()
    stopped: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()

    async def handle(request: Request) -> str:
        if not longer.started.is_set():
            return await cancel_on_disconnect(request, longer.run())
        try:
            return await cancel_on_disconnect(request, short.run(), drain=True)
        except NotReady as error:
            stopped.set_result(error)
            raise

    async with served(handle) as (app, port):
        first = ask(port)
        await longer.started.wait()
        second = ask(port)
        await short.started.wait()
        app.state.draining.set()
        assert "stopping" in str(await stopped)
        assert short.cancelled
        assert not longer.cancelled
        first.close()
        second.close()
    assert longer.cancelled
