"""A server whose event loop was busy: what had arrived by then is read before anything is decided."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop
from fastapi import Request

from services.http.app import Server, create_app, listen, serving, until_read
from services.http.connections import BoundedConnection, connection_of

pytestmark = pytest.mark.integration
REQUEST = b"GET /it HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TIMERS = {
    "idle": BoundedConnection.timeout_keep_alive_handler,
    "late": BoundedConnection._on_late,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_all_that_had_arrived_is_read(loop: str) -> None:
    sock = listen("127.0.0.1", 0)
    app = create_app("test")
    seen: list[str] = []

    @app.get("/it")
    async def it(request: Request) -> None:
        seen.append(request.headers["host"])

    async def play() -> None:
        async with serving(app, sock):
            await until_read()
            assert seen == []
            clients = [socket.create_connection(sock.getsockname()) for _ in range(50)]
            for client in clients:
                client.sendall(REQUEST)
            assert seen == [], "the event loop has not run since"
            await until_read()
            assert len(seen) == len(clients)
            for client in clients:
                client.close()
        await until_read()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(play())


@pytest.mark.parametrize("has_asked", [True, False])
@pytest.mark.parametrize("timer", TIMERS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_timer_that_a_busy_server_is_late_for_does_not_end_a_connection_that_has_asked(
    loop: str, timer: str, has_asked: bool
) -> None:
    sock = listen("127.0.0.1", 0)
    app = create_app("test")
    found: list[BoundedConnection] = []

    @app.get("/it")
    async def it(request: Request) -> None:
        connection = connection_of(request.scope)
        assert connection is not None
        found.append(connection)

    async def play() -> None:
        with socket.create_connection(sock.getsockname()) as client:
            async with serving(app, sock):
                client.sendall(REQUEST)
                assert await asyncio.to_thread(client.recv, 1000)
                if has_asked:
                    client.sendall(REQUEST)
                handle: Callable[[BoundedConnection], None] = TIMERS[timer]
                handle(found[0])
                answer = await asyncio.to_thread(client.recv, 1000)
                assert answer.startswith(b"HTTP/1.1 200") == has_asked

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(play())


async def test_a_server_whose_task_was_cancelled_holds_up_nobody() -> None:
    sock = listen("127.0.0.1", 0)
    server = Server(create_app("cancelled"), *sock.getsockname())
    task = asyncio.create_task(server.serve([sock]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    sock.close()
    await until_read()
