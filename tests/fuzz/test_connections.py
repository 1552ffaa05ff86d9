"""Input that no schema describes: bytes that are not HTTP, false lengths, and slow, numerous or
endless clients."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgpack
import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from tests.support.processes.waits import until

pytestmark = pytest.mark.integration

SERVICE = """
import sys
from fastapi import Request
from services.http import connections
from services.http.app import create_app, read_json, serve
from common.wire.schemas import GroupIds
from common.wire.codec import decode_groups
connections.PATIENCE_S, connections.READER_PATIENCE_S = 2.0, 2.0
connections.max_connections = lambda: 300
connections.MAX_UNREAD_BYTES = 1 << 20
app = create_app("small-server", max_body_bytes=1 << 20)

@app.post("/typed")
def typed(body: GroupIds) -> GroupIds:
    return body

@app.post("/raw")
async def raw(request: Request) -> object:
    return await read_json(request)

@app.post("/packed")
async def packed(request: Request) -> int:
    return len(decode_groups(await request.body()))

@app.get("/much")
def much() -> str:
    return "x" * 50_000_000

serve(app, "127.0.0.1", int(sys.argv[1]))
"""
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Small:
    """A service in a separate process that reads bodies in three ways; its clients time out after
    two seconds."""

    def __init__(self) -> None:
        self.port = free_port()
        words = [sys.executable, "-c", SERVICE, str(self.port)]
        self.process = subprocess.Popen(words, cwd=ROOT)  # pytest shows its log
        until(self.healthy, "it is healthy", self.process)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def healthy(self) -> bool:
        with suppress(OSError):
            return self.exchange(HEALTH).startswith(b"HTTP/1.1 200")
        return False

    def exchange(self, *parts: bytes) -> bytes:
        """Returns the bytes received until the connection ends or the first answer is complete."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            return whole_answer(client)

    def post(
        self, path: str, body: bytes, *headers: str, length: int | None = None
    ) -> tuple[int, bytes]:
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body) if length is None else length}",
            *headers,
        ]
        answer = self.exchange("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]

    def memory_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6


def whole_answer(client: socket.socket) -> bytes:
    """Returns a complete answer, or as much of it as arrives."""
    answer, length = bytearray(), None
    with suppress(ConnectionError):
        while length is None or len(answer) < length:
            if not (data := client.recv(1 << 20)):
                break
            answer += data
            if length is None and (head := bytes(answer).partition(b"\r\n\r\n"))[1]:
                found = re.search(rb"content-length: (\d+)", head[0])
                length = len(head[0]) + 4 + int(found[1]) if found else None
    return bytes(answer)


@contextmanager
def serving() -> Iterator[Small]:
    service = Small()
    try:
        yield service
        assert service.healthy()
    finally:
        service.process.kill()
        service.process.wait()


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with serving() as service:
        yield service


def error_of(body: bytes) -> dict[str, str]:
    error = json.loads(body)["error"]
    assert {"code", "message"} <= error.keys()
    assert isinstance(error, dict)
    return error


JSON = "Content-Type: application/json"
BAD_JSON = [
    b"",
    b"{",
    b'{"ids": ["a"]',
    b"\x00",
    b"\xef\xbb\xbf{}",
    b'{"ids": ["\xff"]}',
    b'{"ids": ["\\ud800"]}',
    b'{"ids": ["a"], "\\udfff": 1}',
    b'{"ids": ["a"], "n": NaN}',
    b'{"ids": ["a"], "n": -Infinity}',
    b'{"ids": ["a"], "n": 1e400}',
    b'{"ids": ["a"], "n": ' + b"9" * 100_000 + b"}",
    b'{"ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"ids":' * 50_000 + b"1" + b"}" * 50_000,
    b"[" * 1_000_000,
    '{"ids": ["a"]}'.encode("utf-16"),
    b"\x1f\x8b\x08\x00" + b"\x00" * 1000,
]


@pytest.mark.parametrize("body", BAD_JSON, ids=lambda body: repr(body[:20]))
def test_body_that_is_not_json_gets_422_that_names_it(small: Small, body: bytes) -> None:
    for path in ("/typed", "/raw"):
        status, answer = small.post(path, body, JSON)
        if path == "/raw" and status == 200:
            assert b"NaN" not in body
            assert b"\\u" not in body
            continue
        assert status == 422, (path, answer[:300])
        assert len(error_of(answer)["message"]) < 1000


def test_text_that_python_can_read_but_not_write_is_refused_by_both_readers(small: Small) -> None:
    assert small.post("/raw", b'{"a": "\\ud83d\\ude00"}', JSON) == (200, '{"a":"😀"}'.encode())
    for body in (b'"\\ud800"', b'{"\\udc00": 1}', b'["\\ud83d", "\\ude00"]'):
        for path in ("/typed", "/raw"):
            assert small.post(path, body, JSON)[0] == 422


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/json; charset=\xff",
        "/",
        "",
    ],
)
def test_other_content_types_are_refused(small: Small, kind: str) -> None:
    status = 422 if kind.startswith("application/json") else 415
    assert small.post("/typed", b"<a/>", f"Content-Type: {kind}")[0] == status


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_a_compressed_body_is_not_unpacked(small: Small, encoding: str) -> None:
    import gzip

    bomb = gzip.compress(b" " * 10_000_000)
    assert small.post("/typed", bomb, JSON, f"Content-Encoding: {encoding}")[0] == 422


BOMBS = [
    b"\xdd\xff\xff\xff\xff",  # announces an array of 4 billion items and holds none
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x81\xa6groups\xdd\x7f\xff\xff\xff",
    b"\x91" * 500_000,
    b"\x81\xa1a" * 100_000,
    msgpack.packb({"groups": [msgpack.ExtType(5, b"x" * 100)]}),
    msgpack.packb({"groups": [msgpack.Timestamp(0, 0)]}),
    msgpack.packb({"groups": [{"id": 2**64 - 1}]}),
    b"\x81\xa6groups\x91\x81\xa2id\xa2\xff\xfe",
    b"\x82\xa6groups\x90\xa6groups\xc0",
]


@pytest.mark.parametrize("body", BOMBS, ids=lambda body: repr(body[:12]))
def test_msgpack_with_false_lengths_takes_no_memory(small: Small, body: bytes) -> None:
    before = small.memory_mb()
    status, answer = small.post("/packed", body, "Content-Type: application/msgpack")
    assert status == 422
    error_of(answer)
    assert small.memory_mb() < before + 100


NO_HTTP = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET  HTTP/1.1\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\n{}",
    b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("sent", NO_HTTP, ids=lambda sent: repr(sent[:40]))
def test_bytes_that_are_not_http_get_400_in_the_common_error_shape(
    small: Small, sent: bytes
) -> None:
    answer = small.exchange(sent)
    assert answer.startswith(b"HTTP/1.1 4"), answer
    error_of(answer.partition(b"\r\n\r\n")[2])


def test_old_and_pipelined_requests_are_answered(small: Small) -> None:
    assert small.exchange(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    with small.connect() as client:
        client.sendall(HEALTH * 500 + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    assert answer.count(b"HTTP/1.1 200") == 501


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /health HTTP/1.1\r\n" + b"A: " + b"x" * 5_000_000,
        b"GET /health HTTP/1.1\r\n" + b"A: x\r\n" * 500_000,
        b"GET /" + b"x" * 3_000_000,
        b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        + b"A: x\r\n" * 500_000,
    ],
    ids=["one header", "many headers", "path", "trailers"],
)
def test_headers_without_end_are_cut_off(small: Small, flood: bytes) -> None:
    before = small.memory_mb()
    with small.connect() as client:
        with suppress(ConnectionError):
            client.sendall(flood)
        answer = whole_answer(client)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 4")), answer[:100]
    assert small.memory_mb() < before + 50


def ends(client: socket.socket) -> bool:
    """Returns whether the service ends the connection; otherwise the socket's timeout raises."""
    with suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"\r\n",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ",
    ],
)
def test_client_that_stops_midway_is_disconnected(small: Small, begun: bytes) -> None:
    with small.connect() as client:
        client.sendall(begun)
        assert ends(client)


@pytest.mark.parametrize(
    "head", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{"]
)
def test_stalled_body_gets_408(small: Small, head: bytes) -> None:
    status, _, body = small.exchange(b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\n" + head).partition(
        b"\r\n\r\n"
    )
    assert status.startswith(b"HTTP/1.1 408")
    assert error_of(body)["code"] == "stalled"


@pytest.mark.parametrize(
    ("request_line", "framing", "status"),
    [
        ("POST /raw", "Transfer-Encoding: chunked", 413),
        ("POST /typed", "Transfer-Encoding: chunked", 413),
        ("POST /raw", "Content-Length: 100000000000", 413),
        ("POST /nowhere", "Transfer-Encoding: chunked", 404),
        ("DELETE /raw", "Transfer-Encoding: chunked", 405),
        ("GET /health", "Transfer-Encoding: chunked", 200),
        ("POST /raw", "Content-Type: text/plain\r\nTransfer-Encoding: chunked", 415),
    ],
)
def test_an_endless_body_is_not_read_after_its_answer(
    small: Small, request_line: str, framing: str, status: int
) -> None:
    piece = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    request_id = "" if status == 415 else "X-Request-Id: r\r\n"
    head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\n{request_id}{framing}\r\n\r\n"
    sent = 0
    answer = b""
    with small.connect() as client:
        client.sendall(head.encode())
        with suppress(ConnectionError):
            while sent < 100_000_000:
                client.sendall(piece)
                sent += len(piece)
        with suppress(ConnectionError):
            answer = client.recv(1 << 16)
    assert sent < 100_000_000, "more than buffers hold was read"
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:100]
    assert small.healthy()


def test_an_answered_body_that_ends_leaves_its_connection_usable(small: Small) -> None:
    body = b" " * 500_000
    head = f"POST /nowhere HTTP/1.1\r\nX-Request-Id: r\r\nContent-Length: {len(body)}\r\n\r\n"
    with small.connect() as client:
        for _ in range(4):  # in all more than is read of one
            client.sendall(head.encode())
            assert whole_answer(client).startswith(b"HTTP/1.1 404")
            client.sendall(body)
        client.sendall(HEALTH)
        assert whole_answer(client).startswith(b"HTTP/1.1 200")


def test_an_answered_body_that_trickles_is_disconnected_without_a_second_answer(
    small: Small,
) -> None:
    with small.connect() as client:
        client.sendall(
            b"POST /nowhere HTTP/1.1\r\nX-Request-Id: r\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert whole_answer(client).startswith(b"HTTP/1.1 404")
        client.sendall(b"x")
        rest = b""
        with suppress(ConnectionError):
            while data := client.recv(1 << 16):
                rest += data
        assert rest == b""


def test_client_that_stops_in_its_second_request_is_disconnected(small: Small) -> None:
    with small.connect() as client:
        client.sendall(HEALTH)
        assert whole_answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /hea")
        assert ends(client)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /health HTTP/1.1\r\nA: ",
        b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nContent-Length: 1000000\r\n\r\n",
    ],
)
def test_client_that_sends_a_byte_now_and_then_is_disconnected(small: Small, begun: bytes) -> None:
    with small.connect() as client:
        client.sendall(begun)
        sent = 0
        with suppress(ConnectionError):
            while sent < 10_000:
                client.sendall(b"x")
                sent += 1
                time.sleep(0.02)
        assert sent < 10_000


def test_steady_body_may_take_as_long_as_it_needs(small: Small) -> None:
    with small.connect() as client:
        client.sendall(
            b"POST /raw HTTP/1.1\r\nX-Request-Id: r\r\nHost: localhost\r\nContent-Length: 40002\r\n\r\n["
        )
        for _ in range(20):
            client.sendall(b" " * 2000)
            time.sleep(0.15)
        client.sendall(b"]")
        assert whole_answer(client).startswith(b"HTTP/1.1 200")


def test_a_steady_body_may_take_as_long_after_its_answer(small: Small) -> None:
    """The connection is usable when it has ended."""

    def is_usable_afterwards() -> bool:
        with small.connect() as client, suppress(ConnectionError):
            client.sendall(
                b"POST /nowhere HTTP/1.1\r\nX-Request-Id: r\r\nContent-Length: 600000\r\n\r\n"
            )
            assert whole_answer(client).startswith(b"HTTP/1.1 404")
            for _ in range(20):
                client.sendall(b" " * 30_000)
                time.sleep(0.15)
            client.sendall(HEALTH)
            return whole_answer(client).startswith(b"HTTP/1.1 200")
        return False

    # Where this process stands still for two seconds, its body is not steady.
    assert any(is_usable_afterwards() for _ in range(20))


def test_a_stranger_cannot_hold_a_connection_with_a_slow_body_after_its_answer(
    small: Small,
) -> None:
    with small.connect() as client:
        client.sendall(
            b"POST /nowhere HTTP/1.1\r\nX-Request-Id: r\r\nContent-Length: 600000\r\n\r\n"
        )
        assert whole_answer(client).startswith(b"HTTP/1.1 404")
        with suppress(ConnectionError):
            for _ in range(2000):
                client.sendall(b" " * 300)
                time.sleep(0.15)
            pytest.fail("all of it was read")


def test_client_that_does_not_read_its_answer_is_disconnected_and_a_reader_gets_all(
    small: Small,
) -> None:
    request = b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert len(small.exchange(request)) > 50_000_000
    with small.connect() as client:
        client.sendall(request)
        until(lambda: open_connections(small) == 0)


def open_connections(small: Small) -> int:
    return sum(
        1
        for each in psutil.Process(small.process.pid).net_connections("tcp")
        if each.status == "ESTABLISHED"
    )


def test_idle_connections_are_bounded_and_go_away(small: Small) -> None:
    with ExitStack() as opened:
        clients = [opened.enter_context(small.connect()) for _ in range(400)]
        refused = whole_answer(clients[-1])
        assert refused.startswith(b"HTTP/1.1 503") or refused == b"", refused[:100]
        until(lambda: open_connections(small) == 0)
    assert small.healthy()
