"""A gate whose sockets are the test's own: what it serves, what it refuses, and what ends it."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.environment.runtimes import gateway_addresses as module
from services.environment.runtimes.gateway_addresses import Gate


class Served:
    """What `serving_also` was asked for, in the place of a server."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now: list[tuple[int, Any]] = []
        self.changed = asyncio.Event()
        patch.setattr(module, "serving_also", self.serve)

    @contextlib.asynccontextmanager
    async def serve(self, port: int, sock: socket.socket) -> AsyncIterator[None]:
        served = (port, sock.getsockname())
        self.now.append(served)
        self.changed.set()
        try:
            yield
        finally:
            sock.close()
            self.now.remove(served)
            self.changed.set()

    async def until(self, count: int) -> None:
        while len(self.now) != count:
            self.changed.clear()
            await self.changed.wait()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://10.0.0.7:8006/base", "10.0.0.7", 8006),
        ("http://host.example", "host.example", 80),
        ("https://host.example", "host.example", 443),
        ("", "", 80),
    ],
)
def test_a_gate_is_at_the_address_of_its_gateway(url: str, host: str, port: int) -> None:
    gate = Gate(url)
    assert (gate.host, gate.port) == (host, port)


async def test_another_address_is_served_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gate = Gate(f"http://127.0.0.1:{port}")
        await gate.open_address("127.0.0.1")
        assert served.now == [], "the gateway itself serves there"
        gate = Gate(f"http://127.0.0.1:{port}")
        await asyncio.gather(gate.open_address("127.0.0.3"), gate.open_address("127.0.0.3"))
        assert served.now == [(port, ("127.0.0.3", port))]
        await gate.close()
        assert served.now == []
        elsewhere = Gate(f"http://127.0.0.1:{port}")
        with pytest.raises(OSError, match="annot assign") as caught:
            await elsewhere.open_address("192.0.2.1")
        assert caught.value.errno == errno.EADDRNOTAVAIL
        assert served.now == []


async def test_what_a_sandbox_sends_is_served_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(monkeypatch)
    gate = Gate("http://127.0.0.1:8006")
    path = tmp_path / "gateway.sock"
    await gate.open_file(path)
    await gate.open_file(tmp_path / "other.sock")
    found = {each: each.lstat().st_mode for each in tmp_path.iterdir()}  # noqa: ASYNC240
    assert list(found) == [path]
    assert stat.S_IMODE(found[path]) == 0o666, "every user may open it"

    loop = asyncio.get_running_loop()
    senders = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for each in (*senders, *listeners):
            stack.enter_context(each)
        for sender, listener in zip(senders, listeners, strict=True):
            sender.setblocking(False)
            await loop.sock_connect(sender, str(path))
            socket.send_fds(sender, [b"1"], [listener.fileno()])
        await served.until(3)
        assert sorted(served.now) == sorted((8006, each.getsockname()) for each in listeners)
        senders[1].close()
        await served.until(2)

        # What sends no socket, or nothing at all, is left alone.
        for descriptors in ([], [os.open(os.devnull, os.O_RDONLY)]):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.setblocking(False)
                await loop.sock_connect(stranger, str(path))
                socket.send_fds(stranger, [b"1"], descriptors)
                assert await loop.sock_recv(stranger, 1) == b""
            for descriptor in descriptors:
                os.close(descriptor)
        assert len(served.now) == 2
        await gate.close()
        await served.until(0)


async def test_a_fault_with_one_sandbox_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(monkeypatch)
    serve = served.serve
    faults = [RuntimeError("out of order")]

    def faulty(port: int, sock: socket.socket) -> Any:
        if faults:
            raise faults.pop()
        return serve(port, sock)

    monkeypatch.setattr(module, "serving_also", faulty)
    gate = Gate("http://127.0.0.1:8006")
    path = tmp_path / "gateway.sock"
    await gate.open_file(path)
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            for sender in (first, second):
                sender.setblocking(False)
                await loop.sock_connect(sender, str(path))
                socket.send_fds(sender, [b"1"], [listener.fileno()])
                if sender is first:
                    assert await loop.sock_recv(sender, 1) == b""
            await served.until(1)
        await served.until(0)
    assert "the gateway cannot be served in a sandbox" in caplog.text
    await gate.close()
