"""The gateway at other addresses, and at sockets that sandboxes send."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvloop

from services.environment.runtimes.gateway_addresses import Gate
from services.http.app import create_app, listen, serving

pytestmark = pytest.mark.integration


@asynccontextmanager
async def opened() -> AsyncIterator[Gate]:
    """Yields the gate of a server."""
    sock = listen("127.0.0.1", 0)
    gate = Gate(f"http://127.0.0.1:{sock.getsockname()[1]}")
    async with serving(create_app("test"), sock):
        yield gate
        await gate.close()


async def is_healthy(address: str, port: int) -> bool:
    async with httpx.AsyncClient() as http:
        try:
            return (await http.get(f"http://{address}:{port}/health")).is_success
        except httpx.TransportError:
            return False


async def until_served(address: str, port: int, wanted: bool) -> None:
    while await is_healthy(address, port) != wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def open_descriptors() -> int:
    """Returns how many files and sockets this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def send(path: Path, *descriptors: int) -> None:
    """Sends descriptors to a gate and waits until it has ended the connection."""
    with socket.socket(socket.AF_UNIX) as sender:
        sender.settimeout(30)
        sender.connect(str(path))
        socket.send_fds(sender, [b"1"], descriptors)
        assert sender.recv(1) == b""


async def test_the_gateway_serves_at_another_address_until_the_gate_is_closed() -> None:
    async with opened() as gate:
        assert not await is_healthy("127.0.0.2", gate.port)
        await gate.open_address("127.0.0.2")
        await gate.open_address("127.0.0.2")
        assert await is_healthy("127.0.0.2", gate.port)
        await gate.close()
        assert not await is_healthy("127.0.0.2", gate.port)
        assert await is_healthy("127.0.0.1", gate.port)
        await gate.open_address("127.0.0.1")


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_socket_that_is_sent_is_served_until_its_sender_ends(
    factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    path = tmp_path / "gateway.sock"

    async def play() -> None:
        async with opened() as gate:
            await gate.open_file(path)
            # Nothing, a file, and a socket that cannot listen: each ends only its sender.
            await asyncio.to_thread(send, path)
            before = open_descriptors()
            with (tmp_path / "file").open("w") as file:
                await asyncio.to_thread(send, path, file.fileno())
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                await asyncio.to_thread(send, path, datagrams.fileno())
            # A program could send files until the server has no descriptors left.
            assert open_descriptors() == before
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                with socket.socket(socket.AF_UNIX) as sender:
                    sender.connect(str(path))
                    socket.send_fds(sender, [b"1"], [listener.fileno()])
                    listener.close()
                    await until_served("127.0.0.1", port, wanted=True)
                await until_served("127.0.0.1", port, wanted=False)
            assert await is_healthy("127.0.0.1", gate.port)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(play(), 60))


async def test_the_gate_goes_on_after_a_time_without_free_descriptors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.sock"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    async with opened() as gate, asyncio.timeout(60):
        await gate.open_file(path)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.socket(socket.AF_UNIX) as sender,
        ):
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
                with suppress(OSError):
                    while True:
                        taken.append(os.dup(0))
                sender.connect(str(path))
                while "no connection to the gateway" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            finally:
                for descriptor in taken:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

            socket.send_fds(sender, [b"1"], [listener.fileno()])
            await until_served("127.0.0.1", listener.getsockname()[1], wanted=True)
