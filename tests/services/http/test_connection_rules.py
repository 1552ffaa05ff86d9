"""The bounds of a connection, exactly: bytes of heads and of bodies that nobody reads, times and
rates, on a transport of the test and a clock that jumps.
"""

import asyncio
import random
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from services.http import connections
from services.http.connections import (
    MAX_HEAD_BYTES,
    MIN_BYTES_PER_S,
    PATIENCE_S,
    READER_PATIENCE_S,
    BoundedConnection,
    connection_of,
    max_connections,
)
from tests.simulation.virtual_time import VirtualLoop, simulated


class Transport(asyncio.Transport):
    """What a connection writes, and whether it has closed."""

    def __init__(self) -> None:
        super().__init__()
        self.content = b""
        self.end = ""
        self.left = 0
        self.socket: Any = None

    def write(self, data: Any) -> None:
        assert not self.end
        self.content += data

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.end = self.end or "closed"

    def abort(self) -> None:
        self.end = "aborted"

    def is_closing(self) -> bool:
        return bool(self.end)

    def get_write_buffer_size(self) -> int:
        return self.left

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {
            "socket": self.socket,
            "peername": ("127.0.0.1", 9),
            "sockname": ("127.0.0.1", 8),
        }.get(name, default)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    @property
    def status(self) -> int | None:
        return int(self.content.split()[1]) if self.content else None


class Opened:
    """A connection whose requests are answered when the test says so, and its client."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.may_answer = asyncio.Event()
        self.reads = True
        self.unread = False
        config = uvicorn.Config(
            self.app,
            http=BoundedConnection,
            ws="none",
            log_config=None,
            interface="asgi3",
            proxy_headers=False,
        )
        config.load()
        self.state = ServerState()
        self.connection = BoundedConnection(config, self.state, {}, _loop=loop)
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body = b""
        more = self.reads
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await self.may_answer.wait()
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def receive(self, data: bytes) -> None:
        self.connection.data_received(data)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        """Lets so much time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))

    def closes(self) -> None:
        self.connection.connection_lost(None)
        self.may_answer.set()
        self.turn()


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with simulated(0) as loop:
        found: list[Opened] = []

        async def open_one() -> None:
            found.append(Opened(loop))

        loop.run_until_complete(open_one())
        [connection] = found
        monkeypatch.setattr(connections, "has_unread", lambda sock: connection.unread)
        yield connection
        connection.closes()


HEAD = b"POST /work HTTP/1.1\r\nhost: localhost\r\n"


def head_of(size: int) -> bytes:
    """Returns a head without its last empty line."""
    filler = b"x-long: "
    return HEAD + filler + b"x" * (size - len(HEAD) - len(filler))


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1])
@pytest.mark.parametrize("piece", [1000, 10**9])
def test_a_head_may_have_so_many_bytes_and_not_one_more(
    size: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(monkeypatch) as one:
        head = head_of(size)
        for begin in range(0, size, piece):
            assert one.transport.status is None
            one.receive(head[begin : begin + piece])
        if size > MAX_HEAD_BYTES:
            assert (one.transport.status, one.transport.end) == (431, "closed")
            assert b"connection: close\r\n" in one.transport.content
            assert b"retry-after" not in one.transport.content
        else:
            assert (one.transport.status, one.transport.end) == (None, "")


def test_bodies_do_not_count_as_heads_and_every_request_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(monkeypatch) as one:
        one.may_answer.set()
        for number in range(3):
            size = MAX_HEAD_BYTES - 1000
            body = b"y" * (2 * MAX_HEAD_BYTES)
            one.receive(head_of(size) + b"\r\ncontent-length: %d\r\n\r\n" % len(body))
            for begin in range(0, len(body), 50_000):
                one.receive(body[begin : begin + 50_000])
            assert one.bodies[number] == body
            assert one.transport.end == ""
        assert len(one.bodies) == 3
        assert one.transport.content.count(b"HTTP/1.1 200 OK") == 3
        assert {connection_of(scope) for scope in one.scopes} == {one.connection}
    assert connection_of({}) is None


def test_what_stands_between_the_parts_of_a_body_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(monkeypatch) as one:
        one.receive(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(9):
            extension = b"e" * (MAX_HEAD_BYTES // 2)
            one.receive(b"1;" + extension)
            one.receive(b"\r\nz\r\n")
        assert one.transport.end == ""
        one.receive(b"1;")
        for _ in range(3):
            one.receive(b"e" * (MAX_HEAD_BYTES // 2))
        assert (one.transport.status, one.transport.end) == (431, "closed")


@pytest.mark.parametrize("spare", [0, -1])
def test_so_much_of_a_body_is_read_after_its_answer(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 5000)
    with opened(monkeypatch) as one:
        one.reads = False
        one.may_answer.set()
        for _ in range(2):
            # The second body begins anew.
            one.receive(HEAD + b"content-length: 9000\r\n\r\n" + b"y" * 4000)
            assert one.connection.cycle.response_complete
            one.receive(b"y" * 2500)
            one.receive(b"y" * 2500)
            assert one.transport.end == ""
        one.receive(HEAD + b"content-length: 99000\r\n\r\n" + b"y" * (4000 + spare))
        one.receive(b"y" * 2500)
        one.receive(b"y" * (2500 - spare))
        assert one.transport.end == ("" if spare == 0 else "closed")


@pytest.mark.parametrize("where", ["nothing", "head", "body", "unread body", "answering"])
@pytest.mark.parametrize("enough", [False, True])
def test_a_client_has_so_long_for_what_it_sends(
    where: str, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may take as long as it comes at the least rate; a head may not."""
    rates = {"body": MIN_BYTES_PER_S, "unread body": 100 * MIN_BYTES_PER_S}
    with opened(monkeypatch) as one:
        if where == "unread body":
            one.reads = False
            one.may_answer.set()
        rate = rates.get(where, MIN_BYTES_PER_S)
        wanted = int(rate * PATIENCE_S) - (0 if enough else 1)
        begin = {
            "nothing": b"",
            "head": b"POST /work HTTP/1.1\r\n",
            "body": HEAD + b"content-length: 99999999\r\n\r\n",
            "unread body": HEAD + b"content-length: 99999999\r\n\r\n",
            "answering": HEAD + b"content-length: 0\r\n\r\n",
        }[where]
        if begin:
            one.receive(begin)
        if "body" in where:
            # What has come so far counts too.
            one.receive(b"y" * (wanted - len(begin)))
        one.turn(PATIENCE_S - 1)
        assert one.transport.end == ""
        one.turn(2)
        stays = where == "answering" or ("body" in where and enough)
        assert one.transport.end == ("" if stays else "closed")
        answer = 408 if where == "body" and not enough else None
        if where != "unread body":
            assert one.transport.status == answer
            assert (b'"code":"stalled"' in one.transport.content) is (answer == 408)
        if "body" in where and enough:
            # The next span begins with nothing.
            one.turn(PATIENCE_S)
            assert one.transport.end == "closed"


@pytest.mark.parametrize("where", ["head", "body"])
def test_what_a_busy_server_has_not_read_yet_is_waited_for(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(monkeypatch) as one:
        one.receive(HEAD if where == "head" else HEAD + b"content-length: 9\r\n\r\n")
        one.unread = True
        one.turn(2.5 * PATIENCE_S)
        assert one.transport.end == ""
        one.unread = False
        one.turn(PATIENCE_S)
        assert one.transport.end == "closed"


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_reads_nothing_is_left_and_one_that_reads_is_not(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    with opened(monkeypatch) as one:
        one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        one.transport.left = 100_000
        one.connection.pause_writing()
        for _ in range(draw.randint(1, 5)):
            one.transport.left -= draw.choice([1, 1000])
            one.turn(READER_PATIENCE_S)
            assert one.transport.end == ""
        if draw.random() < 0.5:
            one.transport.left += draw.choice([0, 5])
            one.turn(READER_PATIENCE_S)
            assert one.transport.end == "aborted"
        else:
            one.connection.resume_writing()
            one.turn(3 * READER_PATIENCE_S)
            assert one.transport.end != "aborted"


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"PRI * HTTP/2.1\r\n\r\n", 400),
        (b"\x16\x03\x01", 400),
        (b"GET / HTTP/1.1\r\n", None),
    ],
)
def test_what_is_not_http_1_1_is_told(
    first: bytes, says: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(monkeypatch) as one:
        one.receive(first)
        assert one.transport.status == says
        before = one.transport.content
        if says:
            one.receive(b"more")
            assert one.transport.content == before, "what comes after the end is not read"


@pytest.mark.parametrize("spare", [0, 1])
def test_no_more_connections_than_files_allow(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 3)
    monkeypatch.setattr(BoundedConnection, "refused", 0)
    with opened(monkeypatch) as one:
        one.state.connections.update(object() for _ in range(1 + spare))  # type: ignore[misc]
        another = BoundedConnection(one.connection.config, one.state, {}, _loop=one.loop)
        transport = Transport()
        another.connection_made(transport)
        if spare:
            assert (transport.status, transport.end) == (503, "closed")
            assert b"\r\nretry-after: 1\r\n" in transport.content
            assert b'"code":"overloaded"' in transport.content
        else:
            assert (transport.status, transport.end) == (None, "")
        assert BoundedConnection.refused == spare
        another.connection_lost(None)


@pytest.mark.parametrize(
    ("files", "limit"), [(100, 64), (319, 64), (320, 64), (321, 65), (1000, 744), (10**6, 8192)]
)
def test_the_process_keeps_files_for_itself(
    files: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, 10**7))
    assert max_connections() == limit


# ---------------------------------------------------------------- answers


def ends_by_error(one: Opened) -> None:
    one.connection.connection_lost(ConnectionResetError())


def ends_of_client(one: Opened) -> None:
    one.connection.eof_received()


def idles(one: Opened) -> None:
    one.connection.timeout_keep_alive_handler()


def asks_again(one: Opened) -> None:
    one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\n")


def server_ends(one: Opened) -> None:
    one.connection.shutdown()


def reads_nothing(one: Opened) -> None:
    one.transport.left = 9
    one.connection.pause_writing()
    one.turn(READER_PATIENCE_S)


@pytest.mark.parametrize(
    "deed", [ends_by_error, ends_of_client, idles, asks_again, server_ends, reads_nothing]
)
@pytest.mark.parametrize("kernel", [True, False, None])
@pytest.mark.parametrize("left", [0, 7])
def test_what_became_of_an_answer(
    deed: Callable[[Opened], None], kernel: bool | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernel` is what it knows of the socket, `left` what it has not taken yet."""
    monkeypatch.setattr(connections, "was_taken", lambda sock: kernel)
    with socket.socket() as sock, opened(monkeypatch) as one:
        one.transport.socket = sock
        one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        delivery = one.connection.deliver()
        one.may_answer.set()
        one.turn()
        assert one.connection.cycle.response_complete
        one.transport.left = left
        expected = kernel if not kernel else left == 0
        assert delivery.taken() is expected, "while the connection is open"
        deed(one)
        if deed in (ends_by_error, reads_nothing):
            expected = False
        elif deed is asks_again:
            expected = True
        else:
            expected = left == 0 and kernel is not False
        assert delivery.taken() is expected
        assert not one.connection.deliveries


def test_an_answer_that_nobody_reads_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "was_taken", lambda sock: None)
    with socket.socket() as sock, opened(monkeypatch) as one:
        one.transport.socket = sock
        one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        delivery = one.connection.deliver()
        one.transport.left = 9
        one.connection.pause_writing()
        one.turn(READER_PATIENCE_S - 1)
        assert delivery.taken() is None
        one.turn(2)
        assert (delivery.taken(), one.transport.end) == (False, "aborted")


def test_an_idle_connection_that_has_asked_again_is_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(monkeypatch) as one:
        one.may_answer.set()
        one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        one.unread = True
        one.connection.timeout_keep_alive_handler()
        assert one.transport.end == ""
        one.unread = False
        one.connection.timeout_keep_alive_handler()
        assert one.transport.end == "closed"


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_the_client_closes_after_an_answer_that_is_followed(
    followed: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How it closes tells whether it has read the answer."""
    with socket.socket() as sock, opened(monkeypatch) as one:
        one.transport.socket = sock
        one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        if followed:
            one.connection.deliver()
        if whole:
            one.may_answer.set()
            one.turn()
        else:
            answer: Any = one.connection.cycle.transport
            answer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            answer.close()
        assert one.transport.content.startswith(b"HTTP/1.1 200 OK")
        assert one.transport.end == ("" if followed and whole else "closed")


def test_whoever_waits_hears_that_the_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    with opened(monkeypatch) as one:
        one.receive(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        one.connection.when_lost = lambda: heard.append("left")
        assert not one.connection.is_lost
        one.transport.close()
        assert one.connection.is_lost
        assert heard == []
        one.connection.connection_lost(None)
        assert heard == ["left"]
        one.connection.when_lost = None
