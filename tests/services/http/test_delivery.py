"""Whether a client took its answer, told by the end of its real connection, on both event loops and
in TLS."""

import asyncio
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import uvloop
from fastapi import FastAPI, Request, Response

from services.http.app import create_app, listen, serving
from services.http.connections import connection_of
from services.http.delivery import Delivery
from tests.support.processes.certificates import Certificates, make_certificates

pytestmark = pytest.mark.integration
BODY = 3000
LARGE = 20_000_000
LIMIT_S = 60.0


@dataclass
class Server:
    """A server in a thread, whose answers are followed."""

    port: int
    context: ssl.SSLContext | None
    deliveries: list[Delivery] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    """The handler of `/busy` blocks the server until it is set."""

    def app(self) -> FastAPI:
        app = create_app("test")

        @app.get("/{what}")
        async def answer(what: str, request: Request) -> Response:
            if what == "busy":
                self.asked.set()
                self.goes_on.wait(LIMIT_S)
            response = Response(b"x" * (LARGE if what == "large" else BODY))
            connection = connection_of(request.scope)
            assert connection is not None
            self.deliveries.append(connection.deliver())
            return response

        return app

    def connect(self) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        if self.context is None:
            return plain
        return self.context.wrap_socket(plain, server_hostname="127.0.0.1")

    def outcome(self, number: int = 0) -> bool:
        """Returns what became of an answer, once that is known."""
        wait_until(lambda: len(self.deliveries) > number)
        delivery = self.deliveries[number]
        found: list[bool] = []

        def is_known() -> bool:
            # The server closes the socket in its own thread, perhaps just now.
            with suppress(OSError):
                taken = delivery.taken()
                if taken is not None:
                    found.append(taken)
            return bool(found)

        wait_until(is_known)
        return found[0]


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


@contextmanager
def running(
    factory: Callable[[], asyncio.AbstractEventLoop], context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    sock = listen("127.0.0.1", 0)
    server = Server(sock.getsockname()[1], context)
    started = threading.Event()
    over = threading.Event()

    async def serve() -> None:
        async with serving(server.app(), sock):
            started.set()
            await asyncio.to_thread(over.wait)

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(LIMIT_S)
        yield server
    finally:
        server.goes_on.set()
        over.set()
        thread.join()


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["asyncio", "uvloop", "uvloop with TLS"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    context = None
    if "TLS" in request.param:
        certificates: Certificates = request.getfixturevalue("certificates")
        for name, value in certificates.env().items():
            monkeypatch.setenv(name, value)
        context = ssl.create_default_context(cafile=certificates.authority)
    with running(LOOPS[request.param.split()[0]], context) as server:
        yield server


def ask(sock: socket.socket, path: str = "/small", *headers: str) -> None:
    lines = [f"GET {path} HTTP/1.1", "host: 127.0.0.1", *headers, "", ""]
    sock.sendall("\r\n".join(lines).encode())


def read(sock: socket.socket, size: int | None = None) -> bytes:
    """Reads an answer, or its first bytes: never more, which the kernel keeps."""
    content = b""
    while size is None or len(content) < size:
        if size is None and b"\r\n\r\n" in content:
            head, _, _ = content.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            size = len(head) + 4 + length
            continue
        part = sock.recv(1 if size is None else size - len(content))
        assert part
        content += part
    return content


HEADERS = pytest.mark.parametrize(
    "headers", [(), ("connection: close",)], ids=["kept alive", "closed after it"]
)


@HEADERS
def test_a_client_that_read_everything_took_its_answer(
    server: Server, headers: tuple[str, ...]
) -> None:
    client = server.connect()
    ask(client, "/small", *headers)
    read(client)
    time.sleep(0.1)
    assert server.deliveries[-1].taken() is None, "its connection is still open"
    client.close()
    assert server.outcome()


def test_a_client_that_asks_again_took_its_answer_and_may_leave_the_next(server: Server) -> None:
    client = server.connect()
    ask(client)
    read(client)
    ask(client)
    assert server.outcome(0)
    select.select([client], [], [], LIMIT_S)
    client.close()
    assert not server.outcome(1)
    assert server.outcome(0)


@HEADERS
@pytest.mark.parametrize(("path", "size"), [("/small", 0), ("/small", 100), ("/large", 1_000_000)])
def test_a_client_that_leaves_bytes_unread_did_not_take_its_answer(
    server: Server, path: str, size: int, headers: tuple[str, ...]
) -> None:
    client = server.connect()
    ask(client, path, *headers)
    select.select([client], [], [], LIMIT_S)
    if server.context is None:
        read(client, size)
    client.close()
    assert not server.outcome()


@HEADERS
def test_a_client_that_left_while_the_server_was_busy_did_not_take_its_answer(
    server: Server, headers: tuple[str, ...]
) -> None:
    client = server.connect()
    ask(client, "/busy", *headers)
    assert server.asked.wait(LIMIT_S)
    client.close()
    server.goes_on.set()
    assert not server.outcome()


CLIENT = """
import socket, sys, time
port, size = map(int, sys.argv[1:])
client = socket.create_connection(("127.0.0.1", port))
client.sendall(b"GET /small HTTP/1.1\\r\\nhost: 127.0.0.1\\r\\n\\r\\n")
head = b""
while not head.endswith(b"\\r\\n\\r\\n"):
    head += client.recv(1)
while size > 0:
    size -= len(client.recv(size))
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("size", [0, BODY])
def test_a_killed_client_took_what_it_had_read(size: int) -> None:
    with running(uvloop.new_event_loop) as server:
        words = [sys.executable, "-I", "-S", "-c", CLIENT, str(server.port), str(size)]
        client = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert client.stdout is not None
        client.stdout.readline()
        assert server.deliveries[-1].taken() is None
        client.kill()
        client.wait()
        client.stdout.close()
        assert server.outcome() == (size == BODY)


@pytest.mark.parametrize("size", [0, BODY])
async def test_what_the_kernel_knows_is_known_before_the_loop_has_looked(size: int) -> None:
    sock = listen("127.0.0.1", 0)
    server = Server(sock.getsockname()[1], None)
    async with serving(server.app(), sock):
        client = server.connect()
        ask(client)
        await asyncio.to_thread(select.select, [client], [], [], LIMIT_S)
        if size:
            await asyncio.to_thread(read, client)
        client.close()
        assert server.deliveries[-1].taken() == (size == BODY)
