"""The client retries until its deadline, then says which service did not answer and why."""

import asyncio
import gzip
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from aiohttp import web
from fastapi import FastAPI, Response

from common.clients import base
from common.clients.base import Client, Unreachable, wait_healthy
from common.clients.data import DataClient
from common.clients.reward import RewardClient
from common.clients.rollout import GenerationFailed, completion_from_answer
from common.errors import InvalidInput, ServiceError
from common.process import logs, progress
from common.wire.schemas import RewardItem
from services.http.app import create_app, listen
from tests.support.errors import raises
from tests.support.processes.ports import free_port


def in_process(app: FastAPI, deadline_s: float = 20, service: str = "thing") -> Client:
    return Client(
        service, "http://thing", transport=httpx.ASGITransport(app), deadline_s=deadline_s
    )


@pytest.fixture
async def late_port() -> AsyncIterator[int]:
    """A port where a service starts to listen only after half a second."""
    port = free_port()

    async def start() -> None:
        await asyncio.sleep(0.5)
        with listen("127.0.0.1", port) as sock:
            await server.serve(sockets=[sock])

    server = uvicorn.Server(uvicorn.Config(create_app("late"), log_config=None))
    task = asyncio.create_task(start())
    yield port
    server.should_exit = True
    await asyncio.wait_for(task, 30)


async def test_a_call_waits_for_a_service_that_starts_later(late_port: int) -> None:
    async with Client("late", f"http://127.0.0.1:{late_port}", deadline_s=30) as client:
        assert (await client.request("GET", "/health")).json()["status"] == "healthy"


async def test_wait_healthy_waits_as_long_as_a_service_makes_progress() -> None:
    """In the process of the one that waits, too: its own looks are no progress."""
    loading = ["weights"]
    moves = True

    async def load() -> None:
        for _ in range(25):
            await asyncio.sleep(0.1)
            if moves:
                progress.moved()
        loading.clear()

    app = create_app("reward-server", not_ready=lambda: loading[0] if loading else None)
    async with in_process(app) as client:
        task = asyncio.create_task(load())
        await wait_healthy([client], 0.5)
        await task
        loading.append("weights")
        moves = False
        task = asyncio.create_task(load())
        with pytest.raises(Unreachable, match=r"not healthy after 0.5 s without progress: thing"):
            await wait_healthy([client], 0.5)
        task.cancel()


async def test_wait_healthy_waits_and_names_the_service(late_port: int) -> None:
    said: list[str] = []
    async with Client("late", f"http://127.0.0.1:{late_port}") as client:
        await wait_healthy([client], 30, said.append, every_s=0)
    assert said
    assert f"late at http://127.0.0.1:{late_port}" in said[0]


async def test_unreachable_names_the_service_and_the_reason() -> None:
    port = free_port()
    async with DataClient("data-server", f"http://127.0.0.1:{port}", deadline_s=1) as client:
        with pytest.raises(
            Unreachable,
            match="data-server did not answer GET /stats in time: Cannot connect to host",
        ) as caught:
            await client.stats()
    assert caught.value.value == f"http://127.0.0.1:{port}"
    assert caught.value.remedy == "look at the log of data-server"


async def test_an_attempt_cut_off_by_the_deadline_does_not_hide_the_reason_before_it() -> None:
    attempts = list[int]()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        attempts.append(1)
        if len(attempts) == 1:
            return httpx.Response(503, text="disk full")
        await asyncio.sleep(60)  # longer than the deadline
        raise httpx.ReadTimeout("", request=request)

    async with Client(
        "thing", "http://thing", transport=httpx.MockTransport(answer), deadline_s=4
    ) as client:
        with pytest.raises(
            Unreachable, match="thing did not answer GET /work in time: HTTP 503: disk full"
        ):
            await client.request("GET", "/work")
    assert len(attempts) == 2


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
async def test_a_service_that_stops_reading_a_large_body_is_given_up_at_the_deadline() -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as stopped:  # accepts connections, and reads nothing
        async with Client(
            "thing", f"http://127.0.0.1:{stopped.getsockname()[1]}", deadline_s=0.5
        ) as client:
            ways: list[dict[str, Any]] = [
                {"content": bytes(64 << 20), "headers": {}},
                {"content": bytes(64 << 20)},
            ]
            for arguments in ways:
                with raises(Unreachable, field="url"):
                    await asyncio.wait_for(client.request("POST", "/large", **arguments), 400)


async def test_wait_healthy_names_every_unhealthy_service() -> None:
    ready, loading = create_app("ready"), create_app("loading", not_ready=lambda: "loads its model")
    clients = [
        in_process(ready, service="ready"),
        in_process(loading, service="loading"),
        Client("gone", f"http://127.0.0.1:{free_port()}"),
    ]
    with pytest.raises(Unreachable) as caught:
        await wait_healthy(clients, 0.1)
    text = str(caught.value)
    assert "loading at http://thing (loads its model)" in text
    assert "gone at http://127.0.0.1" in text
    assert "ready at" not in text
    for client in clients:
        await client.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504, 507])
async def test_temporary_failures_are_retried(status: int) -> None:
    app, calls = create_app("thing"), list[int]()

    @app.get("/work")
    def work() -> Response:
        calls.append(1)
        return Response("later", status) if len(calls) < 3 else Response("done")

    async with in_process(app) as client:
        assert (await client.request("GET", "/work")).text == "done"
    assert len(calls) == 3


async def test_a_service_that_never_recovers_is_named_with_its_last_answer() -> None:
    app = create_app("thing")

    @app.get("/work")
    def work() -> Response:
        return Response("disk full", 503)

    async with in_process(app, deadline_s=0.3) as client:
        with pytest.raises(
            Unreachable, match="thing did not answer GET /work in time: HTTP 503: disk full"
        ):
            await client.request("GET", "/work")


@pytest.mark.parametrize(
    ("asked", "attempts"), [("60", 1), ("soon", 3), ("Wed, 21 Oct 2026 07:28:00 GMT", 3), ("²", 3)]
)
async def test_retry_after_is_respected(asked: str, attempts: int) -> None:
    app, calls = create_app("thing"), list[int]()

    @app.get("/work")
    def work() -> Response:
        calls.append(1)
        headers = (
            {}
            if len(calls) > 2
            else {"retry-after": asked.encode("latin-1", "replace").decode("latin-1")}
        )
        return Response(
            "done" if len(calls) > 2 else "later", 200 if len(calls) > 2 else 503, headers
        )

    async with in_process(app, deadline_s=2 if attempts == 1 else 30) as client:
        if attempts == 1:
            with pytest.raises(Unreachable, match="HTTP 503: later"):
                await client.request("GET", "/work")
        else:
            assert (await client.request("GET", "/work")).text == "done"
    assert len(calls) == attempts


async def test_a_refusal_is_not_retried_and_keeps_its_parts() -> None:
    app, calls = create_app("thing"), list[int]()

    @app.get("/work")
    def work() -> None:
        calls.append(1)
        raise InvalidInput("no", field="size", value=7, remedy="send 8")

    async with in_process(app) as client:
        with raises(ServiceError, code="invalid_input", field="size", value="7") as caught:
            await client.request("GET", "/work")
        error = caught.value
        assert (error.status, error.code, error.field, error.value, error.remedy) == (
            422,
            "invalid_input",
            "size",
            "7",
            "send 8",
        )
        with raises(ServiceError, code="not_found"):
            await client.request("GET", "/absent")
    assert len(calls) == 1


@pytest.mark.parametrize(
    "content", ["<html>teapot</html>", "[]", '{"error": "text"}', '{"error": {}}']
)
async def test_a_refusal_of_unknown_shape_is_shown(content: str) -> None:
    app = create_app("thing")

    @app.get("/work")
    def work() -> Response:
        return Response(content, 418)

    async with in_process(app) as client:
        with raises(ServiceError, status=418) as caught:
            await client.request("GET", "/work")
    assert content in caught.value.message


async def test_an_unexpected_answer_is_an_error() -> None:
    app = create_app("reward-server")

    @app.post("/batch_reward")
    def grade() -> dict[str, Any]:
        return {"rewards": [1.0]}

    async with RewardClient(
        "reward-server", "http://r", transport=httpx.ASGITransport(app), deadline_s=5
    ) as client:
        with raises(ServiceError, field="rewards.0", value="1.0"):
            await client.batch_reward([RewardItem(response="#### 1", ground_truth="1")])


async def test_flush_returns_when_the_service_has_flushed() -> None:
    flushed: list[int] = []
    async with in_process(create_app("thing", flush=lambda: flushed.append(1))) as client:
        await client.flush()
    assert flushed == [1]


def answer(**changes: Any) -> dict[str, Any]:
    """Answers as SGLang's `/generate` does."""
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None]],
        "weight_version": "3",
    }
    return {"text": "ab", "output_ids": [5, 6], "meta_info": meta | changes}


def test_a_completion_keeps_what_training_needs() -> None:
    completion = completion_from_answer(answer())
    assert completion.token_ids.tolist() == [5, 6]
    assert completion.logprobs.tolist() == [-0.5, -1.0]
    assert completion.weight_versions == [(3, 0, 2)]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    assert completion_from_answer(answer(weight_versions=spans)).weight_versions == [
        (3, 0, 1),
        (4, 1, 2),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": {"type": "abort", "message": "shut down"}},
        {"finish_reason": None},
        {"output_token_logprobs": []},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[None, 5, None], [-1.0, 6, None]]},
        {"output_token_logprobs": [[float("nan"), 5, None], [-1.0, 6, None]]},
        {"output_token_logprobs": [[-0.5, 5, None], [-1.0, 7, None]]},
        {"weight_version": "default"},
    ],
)
def test_an_unusable_answer_is_an_error_not_an_empty_completion(changes: dict[str, Any]) -> None:
    with pytest.raises(GenerationFailed):
        completion_from_answer(answer(**changes))


async def test_many_calls_waiting_for_one_service_log_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "_WARN_EVERY_S", 0.3)
    start = time.monotonic()
    async with Client("reward-server", f"http://127.0.0.1:{free_port()}", deadline_s=1.5) as client:
        waits = [client.request("GET", "/stats") for _ in range(20)]
        assert all(
            isinstance(each, base.Unreachable)
            for each in await asyncio.gather(*waits, return_exceptions=True)
        )
    said = [record.getMessage() for record in caplog.records if "so far for" in record.getMessage()]
    assert 1 <= len(said) <= (time.monotonic() - start) / 0.3  # for all 20 calls
    assert "for reward-server to answer GET /stats" in said[0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"success": False, "message": "the tensor is not finite"}, "the tensor is not finite"),
        ({"success": False, "error_message": "no such adapter"}, "no such adapter"),
        ({"detail": "Not Found"}, '{"detail":"Not Found"}'),
        ([1], "[1]"),
    ],
)
async def test_the_error_of_an_engine_is_shown_by_its_message(body: Any, said: str) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json=body)

    transport = httpx.MockTransport(refuse)
    async with Client("engine", "http://engine", transport=transport) as client:
        with pytest.raises(ServiceError) as caught:
            await client.request("POST", "/update_weights_from_disk")
    assert caught.value.message == f"engine: HTTP 400: {said}"


class _Starting(Client):
    start_s = 60.0


@pytest.mark.parametrize("start_s", [60.0, 0.0])
async def test_a_service_that_may_be_starting_is_waited_for_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start_s: float
) -> None:
    monkeypatch.setattr(base, "_WARN_EVERY_S", 0.1)
    monkeypatch.setattr(_Starting, "start_s", start_s)
    caplog.set_level("INFO")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    expected = "INFO" if start_s else "WARNING"
    async with _Starting("trainer", url) as client:
        with pytest.raises(Unreachable):
            await client.request("GET", "/health", deadline_s=0.6)
        assert {record.levelname for record in _waits(caplog)} == {expected}

        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        with pytest.raises(ServiceError):  # an answer, if only 404
            await client.request("GET", "/health", deadline_s=10)
        await runner.cleanup()

        caplog.clear()
        with pytest.raises(Unreachable):
            await client.request("GET", "/health", deadline_s=0.6)
        assert {record.levelname for record in _waits(caplog)} == {"WARNING"}


def _waits(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if "so far for" in record.getMessage()]


async def test_retries_headers_errors_redirects_and_compressed_answers_over_real_sockets() -> None:
    seen: list[web.Request] = []
    answers = {
        "/late": [
            web.Response(status=503, headers={"retry-after": "0"}),
            web.Response(text="done"),
        ],
        "/bad": [
            web.json_response(
                {"error": {"message": "no", "field": "n", "value": 3, "code": "bad"}}, status=422
            )
        ],
        "/zip": [web.Response(body=gzip.compress(b"x"), headers={"content-encoding": "gzip"})],
        "/moved": [web.Response(status=302, headers={"location": "/late"})],
    }

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        assert await request.read() == b"body"
        if request.path == "/cut":
            request.transport.close()  # type: ignore[union-attr]
        return answers[request.path].pop(0) if request.path in answers else web.Response(text="?")

    app = web.Application()
    app.router.add_post("/{any}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    sent: dict[str, Any] = {"content": b"body", "headers": {"content-type": "x/y"}}
    async with Client(
        "service", f"http://127.0.0.1:{port}/", headers={"authorization": "Bearer t"}
    ) as client:
        with logs.request("the-id"):
            assert (await client.request("POST", "/late", **sent)).text == "done"
        for request in seen:
            names = ("authorization", "content-type", "accept-encoding", logs.REQUEST_HEADER)
            assert [request.headers[name] for name in names] == [
                "Bearer t",
                "x/y",
                "identity",
                "the-id",
            ]
        with raises(ServiceError, code="bad", field="n", value="3") as error:
            await client.request("POST", "/bad", **sent)
        assert (error.value.status, error.value.field, error.value.code) == (422, "n", "bad")
        with raises(ServiceError, field="content-encoding", value="gzip"):
            await client.request("POST", "/zip", **sent)
        with raises(ServiceError, status=302):
            await client.request("POST", "/moved", **sent)
        with pytest.raises(Unreachable, match="/cut"):
            await client.request("POST", "/cut", deadline_s=0.3, **(sent | {"content": "body"}))
        await runner.cleanup()
        with pytest.raises(Unreachable, match="Cannot connect"):
            await client.request("POST", "/late", deadline_s=1, **sent)
