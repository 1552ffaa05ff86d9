"""Common behaviour of every service: health, metrics, a single error shape and a clean shutdown."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from starlette.types import Message

from common.clients.base import Client, wait_healthy
from common.errors import ConfigError, NotFound, NotReady, ServiceLost, shorten
from common.wire.schemas import Wire
from services.http.app import Server, create_app, listen, read_json, serving
from services.http.app import free_port as server_port
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port

JSON = {"content-type": "application/json"}


class Body(Wire):
    number: float
    items: list[int] = Field(min_length=1)


def make_app(**arguments: Any) -> FastAPI:
    app = create_app("thing-server", max_body_bytes=1000, **arguments)

    @app.post("/work")
    def work(body: Body) -> dict[str, float]:
        return {"number": body.number}

    @app.post("/raw")
    async def raw(request: Request) -> dict[str, Any]:
        return {"got": await read_json(request)}

    @app.get("/things/{name}")
    def thing(name: str) -> None:
        if name == "crash":
            raise RuntimeError("a secret detail")
        raise NotFound("there is no such thing", field="name", value=name, remedy="see the list")

    async def bare(name: str, request: Request) -> Response:
        if name != "echo":
            thing(name)
        return JSONResponse({"got": await read_json(request)})

    app.add_bare_route("/bare/{name}", bare)
    return app


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://thing") as client:
        yield client


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, str]:
    """Checks the common error shape and returns the error."""
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert (
        {"code", "message", "remedy"}
        <= set(error)
        <= {"code", "message", "field", "value", "remedy"}
    )
    assert all(isinstance(value, str) for value in error.values())
    assert error["code"] == code
    assert isinstance(error, dict)
    return error


async def test_errors_of_the_domain_keep_field_value_and_remedy(http: httpx.AsyncClient) -> None:
    error = error_of(await http.get("/things/x"), 404, "not_found")
    assert (error["field"], error["value"], error["remedy"]) == ("name", "x", "see the list")


async def test_unknown_paths_and_methods(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    error_of(await http.get("/absent"), 404, "not_found")
    assert "Not Found · remedy: the calls are listed at /docs" in caplog.text
    answer = await http.get("/work")
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_crash_is_a_500_without_secrets_and_the_service_survives(
    http: httpx.AsyncClient,
) -> None:
    for method, path in (("GET", "/things/crash"), ("POST", "/bare/crash")):
        answer = await http.request(method, path, headers=JSON | {"X-Request-Id": "mine"})
        error = error_of(answer, 500, "internal")
        assert error["message"] == "internal error: RuntimeError"
        assert answer.headers.get_list("x-request-id") == ["mine"]
    assert (await http.get("/health")).status_code == 200


async def test_a_bare_route_is_served_counted_and_described_as_any_other(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/bare/echo", json=[1])
    assert answer.json() == {"got": [1]}
    error = error_of(await http.post("/bare/none", json=[1]), 404, "not_found")
    assert (error["field"], error["value"]) == ("name", "none")
    assert (await http.get("/bare/echo")).headers["allow"] == "POST"
    error_of(await http.post("/bare/echo", content=b"x"), 415, "unsupported_media_type")
    counts = (await http.get("/metrics")).text
    assert 'rlhf_http_requests_total{route="/bare/{name}",status="200"} 1.0' in counts
    assert "/bare/{name}" in (await http.get("/openapi.json")).json()["paths"]


async def test_an_answer_of_a_service_that_has_failed_is_a_warning_and_a_refusal_is_not(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for path in ("/things/crash", "/nowhere"):
        await http.get(path)
    levels = {
        vars(record)["event"]["status"]: record.levelname
        for record in caplog.records
        if record.name == "services.http.tracing"
    }
    assert levels == {500: "WARNING", 404: "INFO"}


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ('{"number": "x", "items": [1]}', "number", "x"),
        ('{"number": NaN, "items": [1]}', "body", None),
        ('{"number": -1e999, "items": [1]}', "body", None),
        ('{"number": 1, "items": []}', "items", "[]"),
        ('{"number": 1, "items": [1, "y"]}', "items.1", "y"),
        ('{"number": 1, "items": [1], "more": 2}', "more", "2"),
        ('{"items": [1]}', "number", None),
        ("[]", "body", "[]"),
        ("{", "body", None),
        ('{"number": 1,}', "body", None),
        ("", "body", None),
    ],
)
async def test_bad_bodies_are_named(
    http: httpx.AsyncClient, body: str, field: str, value: str | None
) -> None:
    error = error_of(await http.post("/work", content=body, headers=JSON), 422, "invalid_input")
    assert error["field"] == field
    if value is not None:
        assert error["value"] == value
    assert (await http.post("/work", json={"number": 2, "items": [1]})).json() == {"number": 2.0}


async def test_long_values_are_cut(http: httpx.AsyncClient) -> None:
    error = error_of(
        await http.post("/work", json={"number": "x" * 500, "items": []}), 422, "invalid_input"
    )
    assert len(error["value"]) <= 200


@pytest.mark.parametrize("path", ["/work", "/raw"])
@pytest.mark.parametrize("body", [b'{"number": "\xff", "items": [1]}', b"\xff\xfe", b'{"a": \xc3}'])
async def test_a_body_that_is_not_utf8_is_refused(
    http: httpx.AsyncClient, path: str, body: bytes
) -> None:
    error = error_of(await http.post(path, content=body, headers=JSON), 422, "invalid_input")
    assert error["field"] == "body"
    assert "UTF-8" in error["remedy"]


@pytest.mark.parametrize(
    ("body", "field"),
    [(b"{", "body"), (b'{"a": NaN}', "body"), (b"[" * 900, "body")],
)
async def test_a_body_read_by_hand_is_checked_the_same(
    http: httpx.AsyncClient, body: bytes, field: str
) -> None:
    answer = await http.post("/raw", content=body, headers=JSON)
    assert error_of(answer, 422, "invalid_input")["field"] == field
    assert (await http.post("/raw", content=b'{"a": 1}', headers=JSON)).json() == {"got": {"a": 1}}


async def test_bodies_over_the_limit_by_length_and_by_chunks(http: httpx.AsyncClient) -> None:
    sent: list[int] = []

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            sent.append(number)
            yield b" " * 100

    for path in ("/work", "/raw", "/bare/echo"):
        error = error_of(await http.post(path, content=b"x" * 1001, headers=JSON), 413, "too_large")
        assert (error["field"], error["value"]) == ("body", "1001")
        error_of(await http.post(path, content=chunks(30), headers=JSON), 413, "too_large")
    assert (
        await http.post("/raw", content=b'"' + b"x" * 998 + b'"', headers=JSON)
    ).status_code == 200
    error_of(await http.post("/raw", content=chunks(10), headers=JSON), 422, "invalid_input")


async def test_health_states_why_the_service_is_unhealthy() -> None:
    reasons: list[str | None] = ["loads the data", None]
    app = make_app(not_ready=lambda: reasons[0])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://thing"
    ) as http:
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "unhealthy")
        assert answer.json()["reason"] == "loads the data"
        reasons.pop(0)
        assert (await http.get("/health")).json() == {
            "status": "healthy",
            "service": "thing-server",
        }


async def test_health_is_503_from_the_first_sigterm_on() -> None:
    app = make_app()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://thing"
    ) as http:
        assert (await http.get("/health")).status_code == 200
        Server(app, "127.0.0.1", 0).handle_exit(signal.SIGTERM, None)
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["reason"]) == (
            503,
            "draining: the process is ending",
        )


async def test_metrics_count_by_route_never_by_path(http: httpx.AsyncClient) -> None:
    for name in ("a", "b", "crash"):
        await http.get(f"/things/{name}")
    await http.get("/absent-1")
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    page = answer.text
    assert 'rlhf_http_requests_total{route="/things/{name}",status="404"} 2.0' in page
    assert 'route="/things/{name}",status="500"} 1.0' in page
    assert 'http_request_duration_seconds_count{route="/things/{name}"} 3.0' in page
    assert "absent-1" not in page


async def test_flush_waits_for_what_it_calls_and_fails_with_it() -> None:
    done: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.05)
        done.append("slow")

    def broken() -> None:
        raise OSError("disk full")

    for flush, status in ((slow, 200), (lambda: done.append("quick"), 200), (broken, 500)):
        transport = httpx.ASGITransport(make_app(flush=flush), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://thing") as http:
            assert (
                await http.post("/flush", headers={"x-request-id": "flush-1"})
            ).status_code == status
    assert done == ["slow", "quick"]


async def test_lifespan_of_the_service_is_entered_and_left() -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        steps.append("in")
        yield
        steps.append("out")

    app = make_app(lifespan=life)
    async with app.router.lifespan_context(app):
        assert steps == ["in"]
    assert steps == ["in", "out"]


def test_a_value_in_an_error_is_short_and_can_be_sent() -> None:
    assert len(shorten("x" * 1000)) == 200
    shorten("\ud800").encode()
    assert shorten([1, 2]) == "[1, 2]"


def test_free_ports_are_free() -> None:
    assert all(1024 <= server_port() < 65536 for _ in range(5))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with raises(ConfigError, field="port", value=str(port)):
            listen("127.0.0.1", port)
    with raises(ConfigError, field="port", value="0"):
        listen("203.0.113.1", 0)


def test_small_answers_are_sent_at_once() -> None:
    """With Nagle's algorithm, every answer on a kept connection would wait 40 ms for an
    acknowledgement."""
    with (
        listen("127.0.0.1", 0) as sock,
        socket.create_connection(sock.getsockname()),
    ):
        sock.setblocking(True)
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---------------------------------------------------------------- a real process

SLOW_SERVICE = """
import asyncio, sys
from services.http.app import create_app, serve
app = create_app("slow-server", max_body_bytes=1000)

@app.get("/slow")
async def slow() -> dict[str, str]:
    print("working", flush=True)
    await asyncio.sleep(2)
    return {"status": "finished"}

@app.post("/work")
def work(body: dict[str, int]) -> dict[str, int]:
    return body

serve(app, "127.0.0.1", int(sys.argv[1]))
"""


@contextmanager
def slow_service() -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVICE, str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate(timeout=400)


@pytest.mark.integration
async def test_sigterm_ends_the_service_and_finishes_the_request_in_flight() -> None:
    with slow_service() as (process, port):
        async with Client("slow-server", f"http://127.0.0.1:{port}", deadline_s=400) as client:
            await client.request("GET", "/health")
            in_flight = asyncio.create_task(client.http.get("/slow", timeout=400))
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "working\n"
            process.send_signal(signal.SIGTERM)
            while (reason := await client.unhealthy_reason()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # The socket closes shortly after the signal: a late question finds nobody.
            assert "draining" in reason or "Error" in reason or "Cannot connect" in reason
            assert (await in_flight).json() == {"status": "finished"}
        assert await asyncio.to_thread(process.wait, 400) == 0


async def test_requests_that_do_not_end_are_answered_when_the_service_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.http.app.GRACE_S", 0.05)
    app, sock = make_app(), listen("127.0.0.1", 0)

    @app.get("/forever")
    async def forever() -> None:
        await asyncio.Event().wait()

    @app.get("/part")
    async def part() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begin"
            await asyncio.Event().wait()

        return StreamingResponse(parts())

    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60, trust_env=False
    ) as http:
        async with serving(app, sock):
            calls = [
                asyncio.create_task(http.get(path)) for path in ("/forever", "/forever", "/part")
            ]
            while app.state.load.requests < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        *answers, cut = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        assert isinstance(answer, httpx.Response)
        error_of(answer, 503, "not_ready")
    assert isinstance(cut, httpx.TransportError), "a part is not taken for the whole"
    assert "3 requests that wait are answered with 503" in caplog.text
    assert [record.message for record in caplog.records if record.exc_info] == []


@pytest.mark.integration
async def test_a_client_that_speaks_http_2_is_refused_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with serving(make_app(), sock):
        for first, warnings in ((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0), (b"nonsense\r\n", 1)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 400 ")
            said = [record for record in caplog.records if record.levelname == "WARNING"]
            assert len(said) == warnings


@pytest.mark.integration
async def test_a_streamed_body_over_the_limit_gets_413_over_a_real_socket() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 100

    with slow_service() as (_, port):
        async with Client("slow-server", f"http://127.0.0.1:{port}", deadline_s=400) as client:
            await client.request("GET", "/health")
            async with httpx.AsyncClient() as other:  # `Client` sends no body in parts
                url = f"http://127.0.0.1:{port}/work"
                answer = await other.post(url, content=chunks(), headers=JSON, timeout=60)
            error_of(answer, 413, "too_large")
            assert (await client.http.post("/work", json={"a": 1}, timeout=60)).json() == {"a": 1}


async def test_a_client_in_this_process_that_leaves_is_no_failure_of_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_app("small")
    called = asyncio.Event()

    @app.get("/slow")
    async def slow() -> None:
        called.set()
        await asyncio.Event().wait()

    caplog.set_level("INFO")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://small") as http:
        asking = asyncio.create_task(http.get("/slow"))
        await called.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    [record] = [each for each in caplog.records if each.name == "services.http.tracing"]
    assert (record.levelname, vars(record)["event"]["status"]) == ("INFO", 499)


async def test_client_that_leaves_in_the_middle_of_its_body_causes_no_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_app("small")

    @app.post("/raw")
    async def raw(request: Request) -> object:
        return await read_json(request)

    caplog.set_level("INFO")
    sent: list[Message] = []
    messages = iter(
        ({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    )

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/raw",
        "raw_path": b"/raw",
        "query_string": b"",
        "headers": [],
    }
    scope["headers"] = [(b"content-type", b"application/json")]
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    [record] = caplog.records
    assert (record.levelname, vars(record)["event"]["status"]) == ("INFO", 499)


async def test_an_app_that_does_not_start_is_not_served_in_this_process() -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        raise OSError("no disk")
        yield

    with pytest.raises(NotReady, match="thing-server did not start"):
        async with serving(make_app(lifespan=lifespan), listen("127.0.0.1", 0)):
            pass


async def test_a_service_that_will_never_be_healthy_is_not_waited_for() -> None:
    reason = ServiceLost("its disk has gone", remedy="find it")
    transport = httpx.ASGITransport(make_app(not_ready=lambda: reason))
    async with Client("thing-server", "http://thing", transport=transport) as client:
        with pytest.raises(ServiceLost, match="thing-server: its disk has gone · remedy: find it"):
            await wait_healthy([client], 3600.0)


async def test_an_answer_is_one_packet_but_its_head_does_not_wait_for_a_late_body() -> None:
    app = create_app("test")
    go_on = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        await go_on.wait()
        yield b"late"

    @app.get("/late")
    async def late() -> StreamingResponse:
        return StreamingResponse(parts())

    port = free_port()
    async with serving(app, listen("127.0.0.1", port)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(5):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = await reader.read(1 << 16)
            assert b"\r\n\r\n" in answer
            assert answer.endswith(b"}")
        writer.write(b"GET /late HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(1 << 16), 20)).endswith(b"\r\n\r\n")
        go_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\nlate\r\n0\r\n\r\n"
        writer.close()
