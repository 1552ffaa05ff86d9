"""How long a call is waited for, what is asked and said meanwhile, and when it is sent once more: to
the second, on a virtual clock, for services that work, stand still, lose requests or say nothing.
"""

import asyncio
import base64
import itertools
import json
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest

from common.clients.base import Client, Unreachable, _Patience, wait_healthy
from common.clients.engines import GeneratingClient
from common.clients.environment import EnvironmentClient
from common.clients.network import Network, Sent
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import GenerationFailed, RolloutClient, completion_from_answer
from common.errors import ServiceError, ServiceLost
from common.process import logs, watchdog
from common.process import progress as process_progress
from common.wire.headers import ASKED_ATTEMPT, ATTEMPT, PROGRESS, WORKING
from common.wire.schemas import RewardItem
from tests.simulation.virtual_time import simulated
from tests.support.errors import raises


class Service(httpx.AsyncBaseTransport):
    """A service whose answers to calls, and to looks at it, a test decides."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.attempts: list[tuple[float, str]] = []
        self.looks: list[tuple[float, str]] = []
        self.answer: Callable[[httpx.Request], Awaitable[httpx.Response]] = self.silent
        self.says: Callable[[float], dict[str, str]] = lambda at: {}

    @property
    def now(self) -> float:
        return round(time.monotonic() - self.began, 6)

    async def silent(self, request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            assert request.headers["x-run-id"] == "run"
            self.looks.append((self.now, request.headers[ASKED_ATTEMPT]))
            return httpx.Response(200, headers=self.says(self.now))
        self.attempts.append((self.now, request.headers[ATTEMPT]))
        return await self.answer(request)


def called(service: Service, limit_s: float) -> Any:
    """Returns the answer or the error of a call, and when the call ended."""

    async def play() -> Any:
        async with Client("thing", "http://thing", transport=service) as client:
            with logs.request("call", "run"):
                try:
                    return await client.request("GET", "/work", deadline_s=limit_s)
                except ServiceError as error:
                    return error

    return asyncio.get_event_loop().run_until_complete(play())


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO]


@pytest.mark.parametrize("limit_s", [20.0, 100.0])
def test_a_call_on_which_the_service_gets_on_has_no_end(limit_s: float) -> None:
    with simulated(0) as loop:
        service = Service()

        async def answer(request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(1000.0)
            return httpx.Response(200)

        service.answer = answer
        service.says = lambda at: {ASKED_ATTEMPT: WORKING, PROGRESS: f"{round(at)}"}
        assert called(service, limit_s).status_code == 200
        assert loop.now == 1000.0
        assert len(service.attempts) == 1
        silent_s = min(10.0, limit_s / 4)
        looks = [silent_s * number for number in range(1, 1 + math.ceil(1000 / silent_s))]
        assert [at for at, _ in service.looks] == pytest.approx(looks[: len(service.looks)])
        assert 0 <= len(looks) - len(service.looks) <= 1
        assert {asked for _, asked in service.looks} == {service.attempts[0][1]}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {ASKED_ATTEMPT: WORKING},
        {ASKED_ATTEMPT: WORKING, PROGRESS: "7"},
        {ASKED_ATTEMPT: WORKING, PROGRESS: "much"},
    ],
    ids=str,
)
def test_a_call_on_which_the_service_does_not_get_on_ends_in_time(said: dict[str, str]) -> None:
    with simulated(0) as loop:
        service = Service()
        service.says = lambda at: said
        error = called(service, 40.0)
        assert isinstance(error, Unreachable)
        assert loop.now == pytest.approx(40.0)
        assert len(service.attempts) == 1


def test_progress_counts_from_the_first_look_on_and_only_if_it_grows() -> None:
    with simulated(0) as loop:
        service = Service()
        # It grows at 20 s for the last time.
        service.says = lambda at: {ASKED_ATTEMPT: WORKING, PROGRESS: f"{9 - (at > 25) + (at > 15)}"}
        assert isinstance(called(service, 40.0), Unreachable)
        assert loop.now == pytest.approx(60.0)


def test_a_request_that_was_lost_is_sent_again_after_two_looks() -> None:
    with simulated(0) as loop:
        service = Service()
        service.says = lambda at: {ASKED_ATTEMPT: "unknown", PROGRESS: f"{round(at)}"}
        assert isinstance(called(service, 40.0), Unreachable)
        # What the service does for others is no progress of this call.
        assert loop.now == pytest.approx(40.0)
        times = [at for at, _ in service.attempts]
        assert len(times) == 2
        assert times[0] == 0.0
        assert 20.0 <= times[1] <= 20.075
        assert len({attempt for _, attempt in service.attempts}) == 2
        assert [at for at, _ in service.looks[:2]] == [10.0, 20.0]


def test_one_look_that_does_not_find_a_request_is_not_enough() -> None:
    with simulated(0) as loop:
        service = Service()
        service.says = lambda at: {ASKED_ATTEMPT: WORKING if at % 20 < 10 else "unknown"}
        assert isinstance(called(service, 80.0), Unreachable)
        assert loop.now == 80.0
        assert len(service.attempts) == 1


def test_a_request_whose_bytes_move_is_not_lost() -> None:
    with simulated(0) as loop:
        service = Service()
        service.says = lambda at: {ASKED_ATTEMPT: "unknown"}

        async def upload(request: httpx.Request) -> httpx.Response:
            for number in range(1, 31):
                await asyncio.sleep(5.0)
                request.extensions["moved"](number * 1000)
            return httpx.Response(200)

        service.answer = upload
        assert called(service, 200.0).status_code == 200
        assert loop.now == 150.0
        assert len(service.attempts) == 1


@pytest.mark.parametrize(("size", "ends"), [((16 << 10) - 1, 40.0), (16 << 10, 70.0)])
def test_pieces_of_a_body_give_time_if_they_are_large_enough(size: int, ends: float) -> None:
    with simulated(0) as loop:
        service = Service()

        async def upload(request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(30.0)
            request.extensions["moved"](size)
            return await service.silent(request)

        service.answer = upload
        assert isinstance(called(service, 40.0), Unreachable)
        assert loop.now == pytest.approx(ends)


def test_what_an_attempt_sends_again_gives_no_time() -> None:
    with simulated(0) as loop:
        service = Service()

        async def upload(request: httpx.Request) -> httpx.Response:
            request.extensions["moved"](100_000)
            await asyncio.sleep(15.0)
            raise httpx.ReadError("reset by peer")

        service.answer = upload
        assert isinstance(called(service, 40.0), Unreachable)
        assert loop.now == pytest.approx(40.0)


def test_a_request_that_makes_the_service_crash_is_not_repeated_for_ever() -> None:
    with simulated(0) as loop:
        service = Service()

        async def crash(request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(35.0)
            raise httpx.ReadError("reset by peer")

        service.answer = crash
        service.says = lambda at: {ASKED_ATTEMPT: WORKING, PROGRESS: f"{round(at)}"}
        error = called(service, 40.0)
        assert isinstance(error, Unreachable)
        assert error.about["problem"] == "silent"
        # The third failure is the last whose work has given time: at about 100 s of 105.
        assert 100.0 < loop.now < 150.0
        assert len(service.attempts) == 4


def test_a_service_that_is_full_and_gets_on_is_waited_for() -> None:
    with simulated(0) as loop:
        service = Service()

        async def full(request: httpx.Request) -> httpx.Response:
            is_over = service.now > 300.0
            return httpx.Response(200 if is_over else 503, headers={"retry-after": "3"})

        service.answer = full
        service.says = lambda at: {PROGRESS: f"{round(at)}"}
        assert called(service, 40.0).status_code == 200
        assert 300.0 < loop.now < 305.0
        looks = [at for at, _ in service.looks]
        pauses = [later - earlier for earlier, later in zip([0.0, *looks], looks, strict=False)]
        assert all(10.0 <= pause <= 15.0 for pause in pauses)


@pytest.mark.parametrize("status", [502, 504])
def test_a_status_that_does_not_say_full_gives_no_time(status: int) -> None:
    with simulated(0) as loop:
        service = Service()

        async def fails(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status)

        service.answer = fails
        service.says = lambda at: {PROGRESS: f"{round(at)}"}
        assert isinstance(called(service, 40.0), Unreachable)
        assert loop.now == pytest.approx(40.0)
        assert service.looks == []


def test_a_silent_call_is_said_after_a_minute_and_then_ever_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with simulated(0):
        called(Service(), 1000.0)
    assert told(caplog)[:5] == [
        f"waited {at} s so far for thing to answer GET /work; its connection is silent"
        for at in (60, 120, 240, 480, 960)
    ]


@pytest.mark.parametrize("limit_s", [59.0, 60.0])
def test_a_long_wait_that_is_given_up_is_reported(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    monkeypatch.setattr(watchdog, "deadline_passed", reports.append)
    with simulated(0):
        called(Service(), limit_s)
    text = f"thing did not answer GET /work within {limit_s:.0f} s: no answer"
    assert reports == [text] * (limit_s == 60.0)


def test_an_attempt_that_the_deadline_cuts_off_hides_no_reason_before_it() -> None:
    with simulated(0) as loop:
        service = Service()

        async def refuses_once(request: httpx.Request) -> httpx.Response:
            if len(service.attempts) == 1:
                raise httpx.ConnectError("Connection refused")
            return await service.silent(request)

        service.answer = refuses_once
        error = called(service, 40.0)
        assert error.message.endswith("in time: Connection refused")
        assert error.about["problem"] == "refused"
        assert loop.now == pytest.approx(40.0)
        assert len(service.attempts) == 2


def test_a_call_without_time_is_not_sent() -> None:
    with simulated(0):
        service = Service()
        error = called(service, 0.0)
        assert isinstance(error, Unreachable)
        assert error.message.endswith("no request was sent")
        assert service.attempts == []


@pytest.mark.parametrize("start_s", [0.0, 35.0])
def test_calls_that_wait_are_said_once_in_ten_seconds_and_quietly_at_the_start(
    start_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with simulated(0) as loop:
        service = Service()
        service.answer = failing(httpx.ConnectError("Connection refused"))
        began = time.time()

        async def play() -> None:
            async with Client("thing", "http://thing", transport=service) as client:
                client.start_s = start_s
                calls = [
                    client.request("GET", f"/{number}", deadline_s=60.0) for number in range(3)
                ]
                found = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(each, Unreachable) for each in found)

        loop.run_until_complete(play())
    said = [
        (each.created - began, each)
        for each in caplog.records
        if "so far for thing" in each.getMessage()
    ]
    times = [when for when, _ in said]
    assert 10.0 < times[0] < 12.0
    assert all(10.0 < later - earlier < 12.0 for earlier, later in itertools.pairwise(times))
    assert len(times) == 5
    for when, each in said:
        quiet = when < start_s
        assert each.levelno == (logging.INFO if quiet else logging.WARNING)
        assert each.getMessage().startswith(
            f"waited {round(when)} s so far for thing to answer GET"
        )
        assert each.getMessage().endswith(": Connection refused")
        assert vars(each)["event"] == {
            "code": "waiting",
            "service": "thing",
            "problem": "refused",
            "seconds": round(when),
        }


def failing(error: Exception) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
    async def fail(request: httpx.Request) -> httpx.Response:
        raise error

    return fail


@pytest.mark.parametrize("of_aiohttp", [False, True])
@pytest.mark.parametrize("verdict", ["", "self-signed certificate"])
def test_a_certificate_that_is_not_trusted_ends_the_call_at_once(
    verdict: str, of_aiohttp: bool
) -> None:
    with simulated(0) as loop:
        service = Service()
        refused = ssl.SSLCertVerificationError("all its words")
        if verdict:
            refused.verify_message = verdict
        # aiohttp's own error holds that of Python, and is of the same type.
        outer = ssl.SSLCertVerificationError("of aiohttp") if of_aiohttp else refused
        if of_aiohttp:
            outer.certificate_error = refused  # type: ignore[attr-defined]
        error = httpx.ConnectError("no")
        error.__cause__ = OSError("wrapped")
        error.__cause__.__context__ = outer
        service.answer = failing(error)
        found = called(service, 40.0)
        assert (found.code, found.field, found.value) == ("certificate", "TLS_CA", "http://thing")
        words = verdict or str(outer)
        assert found.message == f"the certificate of thing is not trusted: {words}"
        assert loop.now == 0.0


def test_who_waits_for_services_hears_of_it_ever_less_often() -> None:
    own = process_progress.total()
    others = process_progress.of_others()
    with simulated(0) as loop:
        said: list[tuple[float, str]] = []
        transport = httpx.MockTransport(
            lambda _: httpx.Response(503, json={"reason": "loads", "progress": round(loop.now)})
        )

        async def play() -> None:
            async with Client("thing", "http://thing", transport=transport) as client:
                say: Any = lambda text: said.append((loop.now, text))  # noqa: E731
                await asyncio.wait_for(wait_healthy([client], 8.0, say, every_s=10.0), 200.0)

        with pytest.raises(TimeoutError):
            loop.run_until_complete(play())
    # What others do is not counted as this process's own, which they may wait for in turn.
    assert process_progress.total() == own
    assert process_progress.of_others() > others
    # After 10 s, then 20, 40 and at most 60 s later.
    wanted = [10, 30, 70, 130, 190]
    assert [at for at, _ in said] == pytest.approx(wanted, abs=2.5)
    assert said[0][1] == f"waited {said[0][0]:.0f} s so far for thing at http://thing (loads)"


@pytest.mark.parametrize("limit_s", [59.0, 60.0])
def test_a_long_wait_for_health_that_is_given_up_is_reported(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    monkeypatch.setattr(watchdog, "deadline_passed", reports.append)
    with simulated(0) as loop:
        transport = httpx.MockTransport(failing(OSError("Connection refused")))  # type: ignore[arg-type]

        async def play() -> None:
            async with Client("thing", "http://thing", transport=transport) as client:
                await wait_healthy([client], limit_s)

        with raises(Unreachable, remedy="look at the logs of these tasks") as error:
            loop.run_until_complete(play())
    assert error.value.about == {"service": "thing", "problem": "refused"}
    assert reports == [error.value.message] * (limit_s == 60.0)
    assert error.value.message.startswith(f"not healthy after {limit_s:g} s")


@pytest.mark.parametrize(
    ("answer", "reason", "problem", "progress"),
    [
        (httpx.Response(200), None, "", 0),
        (httpx.Response(299), None, "", 0),
        (httpx.Response(503, json={"reason": "loads", "progress": 4}), "loads", "not_ready", 4),
        (httpx.Response(507, json={"reason": "full"}), "full", "disk_full", 0),
        (httpx.Response(502, content=b"<html>"), "HTTP 502", "error", 0),
        (OSError("Connection refused"), "Connection refused", "refused", 0),
        (TimeoutError(), "TimeoutError", "silent", 0),
    ],
    ids=repr,
)
async def test_why_a_service_is_not_healthy(
    answer: Any, reason: str | None, problem: str, progress: int
) -> None:
    def answered(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, content=answer.content)

    transport = httpx.MockTransport(answered)
    async with Client("thing", "http://thing", transport=transport) as client:
        client.progress = 99
        assert await client.unhealthy_reason() == reason
        assert (client.problem, client.progress) == (problem, progress)


@pytest.mark.parametrize(
    ("status", "kind", "code"), [(401, ServiceError, "unauthorized"), (503, ServiceLost, None)]
)
async def test_a_service_that_will_never_be_healthy(
    status: int, kind: Any, code: str | None
) -> None:
    said = {"reason": "the disk is gone", "lost": True}
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=said))
    async with Client("thing", "http://thing", transport=transport) as client:
        with pytest.raises(kind) as error:
            await client.unhealthy_reason()
    assert error.value.about == {"service": "thing"}
    assert code is None or error.value.code == code
    assert code is not None or error.value.message == "thing: the disk is gone"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"code": "c", "message": "m", "field": "f"}}, "thing: m"),
        ({"error": {"code": "c"}}, 'thing: HTTP 400: {"error": {"code": "c"}}'),
        ({"message": "of SGLang"}, "thing: HTTP 400: of SGLang"),
        ({"error_message": "of smg"}, "thing: HTTP 400: of smg"),
        ({"other": 1}, 'thing: HTTP 400: {"other": 1}'),
        ([1], "thing: HTTP 400: [1]"),
        (None, "thing: HTTP 400: plain"),
    ],
    ids=str,
)
async def test_an_error_of_any_shape_has_a_message(body: Any, message: str) -> None:
    content = b"plain" if body is None else json.dumps(body).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(400, content=content))
    async with Client("thing", "http://thing", transport=transport) as client:
        with pytest.raises(ServiceError) as error:
            await client.request("GET", "/")
    assert error.value.message == message
    assert error.value.status == 400
    is_ours = message == "thing: m"
    assert (error.value.code, error.value.field) == (("c", "f") if is_ours else ("internal", None))


async def test_a_token_that_is_refused_without_our_words_has_a_remedy() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(401, content=b"no"))
    async with Client("thing", "http://thing", transport=transport) as client:
        with raises(ServiceError, code="unauthorized", status=401) as error:
            await client.request("GET", "/")
    assert "API_TOKEN" in str(error.value.remedy)


async def test_an_answer_of_another_type_is_named_by_its_field() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"a": {"b": "x"}}))
    async with Client("thing", "http://thing", transport=transport) as client:
        with raises(ServiceError, field="a.b", value="x") as error:
            await client.json("GET", "/typed", dict[str, dict[str, int]])
        assert "thing: unexpected answer to /typed: " in error.value.message
        with raises(ServiceError, field=None):
            await client.json("GET", "/typed", list[int])
    with pytest.raises(RuntimeError, match="the client of thing is closed"):
        await client.request("GET", "/")


def test_a_look_has_five_seconds_and_a_connection_as_many_as_its_call_up_to_ten() -> None:
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((str(request.url), request.extensions["timeout"]))
        assert "content-length" not in request.headers, "it has no body"
        return httpx.Response(200)

    async def play() -> None:
        transport = httpx.MockTransport(answer)
        async with Client("thing", "http://thing/base/", transport=transport) as client:
            await client.get("/health")
            await client.get("http://other/x")
            await client.request("GET", "/work", deadline_s=4.0)
            await client.request("GET", "/work", deadline_s=40.0)

    with simulated(0) as loop:
        loop.run_until_complete(play())
    assert [url for url, _ in asked] == [
        "http://thing/base/health",
        "http://other/x",
        "http://thing/base/work",
        "http://thing/base/work",
    ]
    assert [limits["connect"] for _, limits in asked] == [5.0, 5.0, 4.0, 10]
    assert all(limits["read"] is None for _, limits in asked)


def test_a_look_ends_after_five_seconds() -> None:
    with simulated(0) as loop:
        silent = httpx.MockTransport(Service().silent)
        with pytest.raises(TimeoutError):
            loop.run_until_complete(Client("thing", "http://thing", transport=silent).get("/x"))
        assert loop.now == 5.0


# ---------------------------------------------------------------- answers of engines in files


def files_in(directory: Path) -> set[Path]:
    return {*directory.iterdir()}


async def body(*pieces: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    if error is not None:
        raise error


async def test_an_answer_is_received_into_a_file_of_its_own(tmp_path: Path) -> None:
    async with RolloutClient("router", "http://router") as client:
        assert client._receiver("/generate") is None
        client.directory = tmp_path / "answers"
        assert client._receiver("/workers") is None
        receive = client._receiver("/generate")
        assert receive is not None
        first = await receive(body(b"one", b"two"))
        second = await receive(body(b"three"))
        assert (first.read_bytes(), second.read_bytes()) == (b"onetwo", b"three")
        assert {first.parent, second.parent} == {client.directory}
        with pytest.raises(httpx.ReadError):
            await receive(body(b"half", error=httpx.ReadError("broke")))
        assert files_in(client.directory) == {first, second}


@pytest.mark.parametrize("count", [1, 3])
async def test_answers_that_are_not_as_many_as_were_asked_for_are_named(count: int) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=[{}] * count))
    async with RolloutClient("router", "http://router", transport=transport) as client:
        with raises(GenerationFailed, field="/generate", value=str(count)) as error:
            await client.answers([1], n=2, max_new_tokens=1, temperature=1.0, stop_token_ids=[])
    assert error.value.message == f"asked for 2 completions, got {count}"


def answer_of(ids: list[int], **more: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": "3",
        **more,
    }
    return {"text": "text", "output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize("has_readers", [False, True])
async def test_completions_are_read_wherever_they_are(has_readers: bool, tmp_path: Path) -> None:
    answers = [answer_of([1, 2]), answer_of([3])]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answers))
    with ThreadPoolExecutor(1) as threads:
        async with RolloutClient("router", "http://router", transport=transport) as client:
            client.directory = tmp_path
            client.readers = threads if has_readers else None
            found = await client.generate(
                [1], n=2, max_new_tokens=2, temperature=1.0, stop_token_ids=[]
            )
    assert [each.token_ids.tolist() for each in found] == [[1, 2], [3]]
    assert [each.weight_versions for each in found] == [[(3, 0, 2)], [(3, 0, 1)]]
    assert {each.kept_tokens.dtype for each in found} == {np.dtype(np.int32)}
    assert files_in(tmp_path) == set(), "a file is gone once it was read"


def test_what_an_answer_was_sampled_from_is_kept_if_it_says_so() -> None:
    kept: dict[str, list[Any]] = {
        "output_token_sampling_mask": [[4, 5], [], [6]],
        "output_token_sampling_logprobs": [-0.1, -0.2, -0.3],
    }
    for truncated in (False, True):
        found = completion_from_answer(answer_of([1, 2, 3], **kept), truncated=truncated)
        assert found.kept_tokens.tolist() == [4, 5, 6]
        assert found.kept_counts.tolist() == [2, 0, 1]
        assert found.kept_tokens.dtype == found.kept_counts.dtype == np.int32
        assert found.logprobs.dtype == np.float32
        assert found.logprobs == pytest.approx([-0.1, -0.2, -0.3])
    with raises(GenerationFailed, field="return_sampling_mask"):
        completion_from_answer(answer_of([1]), truncated=True)
    for name in kept:
        with pytest.raises(GenerationFailed):
            completion_from_answer(answer_of([1, 2, 3], **(kept | {name: kept[name][:2]})))


async def test_calls_that_have_a_time_of_their_own_end_with_it() -> None:
    asked: list[str] = []
    transport = httpx.MockTransport(lambda request: asked.append(str(request.url)))  # type: ignore[arg-type]
    replay = ReplayClient("replay", "http://replay", transport=transport)
    episodes = EnvironmentClient("environment", "http://environment", transport=transport)
    for call in (
        replay.group("g", 0.0),
        replay.listing("fresh", 5, 0.0),
        replay.flush(0.0),
        episodes.delete("r", 0.0),
    ):
        with pytest.raises(Unreachable):
            await call
    assert asked == []


# ---------------------------------------------------------------- connections


async def test_a_connection_has_its_time_and_errors_have_one_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network()
    given: list[Any] = []
    errors: list[Exception] = [aiohttp.ClientError("broke"), TimeoutError(), TimeoutError("late")]

    def call(*arguments: Any, **options: Any) -> Any:
        given.append((arguments, options["timeout"], options["moved"]))
        raise errors[len(given) % 3]

    monkeypatch.setattr(network, "_call", call)
    sizes: list[int] = []
    sent = Sent("PUT", "http://x/y?z", {"a": "b"}, b"content", 7.0, sizes.append, None)
    for number in range(1, 4):
        with pytest.raises(httpx.TransportError) as error:
            await network.exchange(sent)
        assert str(error.value) == ["broke", "TimeoutError", "late"][number % 3]
    arguments, timeout, moved = given[0]
    assert arguments == ("PUT", "http://x/y?z", {"a": "b"}, b"content")
    assert timeout == aiohttp.ClientTimeout(sock_connect=7.0)
    assert moved is sent.moved
    limits = {"connect": 3.0, "read": 4.0, "write": 5.0, "pool": 6.0}
    request = httpx.Request("GET", "http://x/", extensions={"timeout": limits})
    with pytest.raises(httpx.TransportError):
        await network.handle_async_request(request)
    assert given[-1][1] == aiohttp.ClientTimeout(sock_connect=3.0, sock_read=4.0)


def test_a_call_without_a_limit_has_no_timer() -> None:
    async def limits() -> list[float | None]:
        return [_Patience(seconds).attempt().when() for seconds in (math.inf, 5.0)]

    with simulated(0) as loop:
        # An event loop may not take an infinite time.
        assert loop.run_until_complete(limits()) == [None, 5.0]


def test_a_refusal_that_is_repeated_to_the_end_is_told_with_its_remedy() -> None:
    with simulated(0):
        service = Service()
        error = {"code": "full", "message": "no room", "value": 7, "remedy": "wait"}

        async def full(request: httpx.Request) -> httpx.Response:
            return httpx.Response(503, json={"error": error})

        service.answer = full
        text = "thing did not answer GET /work in time: HTTP 503: no room · 7 · wait"
        assert called(service, 4.0).message == text


async def test_the_engines_of_a_client_are_those_behind_it() -> None:
    load = {"num_running_reqs": 1, "num_waiting_reqs": 0, "max_running_requests": 4}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(404)
        assert str(request.url) == "http://engine/v1/loads"
        return httpx.Response(200, json={"loads": [load]})

    transport = httpx.MockTransport(answer)
    async with GeneratingClient("engine", "http://engine/", transport=transport) as client:
        assert await client.engines.room() == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": {"type": "abort"}}, "the completion ended with abort"),
        ({"output_token_logprobs": [[-0.5, 1, None], [-0.5, 3, None]]}, "do not match"),
        ({"output_token_logprobs": [[-0.5, 1, None], [None, 2, None]]}, "not a finite number"),
        ({"output_token_logprobs": [["x", 1, None], [-0.5, 2, None]]}, "lacks what training needs"),
        ({"output_token_logprobs": [[-0.5, 1, None]]}, "do not match"),
        ({"weight_version": "x"}, "lacks what training needs"),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_trained_on(change: dict[str, Any], words: str) -> None:
    with raises(GenerationFailed, field="/generate", status=502) as error:
        completion_from_answer(answer_of([1, 2], **change))
    assert words in error.value.message
    for finish in ("stop", "length"):
        found = completion_from_answer(answer_of([1, 2], finish_reason={"type": finish}))
        assert found.finish_reason == finish


def test_an_empty_answer_cannot_be_trained_on() -> None:
    with raises(GenerationFailed, field="/generate") as error:
        completion_from_answer(answer_of([]))
    assert error.value.message.startswith("the completion is empty")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([5, 0, 1, 2, 3, 4, 5, 32767], ""),
        ([0] * 8, "did not record the experts"),
        ([1] * 7, "7 numbers for 4 tokens"),
        ([], "0 numbers for 4 tokens"),
        ([1] * 7 + [-1], "numbers from -1 to 1"),
        ([1] * 7 + [32768], "numbers from 1 to 32768"),
        (None, "does not say which experts"),
    ],
    ids=str,
)
def test_experts_of_tokens(numbers: list[int] | None, words: str) -> None:
    """Three tokens of a prompt and two of an answer, of which the last was not computed."""
    more: dict[str, Any] = {"prompt_tokens": 3}
    if numbers is not None:
        raw = np.array(numbers, "<i4").tobytes()
        more["routed_experts"] = base64.b64encode(raw).decode()
    answer = answer_of([1, 2], **more)
    if not words:
        found = completion_from_answer(answer, routed=True)
        assert found.routed_experts.view("<u2").tolist() == numbers
        assert len(completion_from_answer(answer).routed_experts) == 0
        return
    field = "routed_experts" if numbers is not None else "return_routed_experts"
    with raises(GenerationFailed, field=field) as error:
        completion_from_answer(answer, routed=True)
    assert words in error.value.message
    if numbers == [0] * 8:
        assert error.value.value == "0"


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("adapter", [None, ("policy", 4)])
@pytest.mark.parametrize("truncates", [False, True])
async def test_a_prompt_is_repeated_where_the_engine_needs_that(
    repeats: bool, n: int, adapter: tuple[str, int] | None, truncates: bool
) -> None:
    bodies: list[Any] = []
    kept = {
        "output_token_sampling_mask": [[1]],
        "output_token_sampling_logprobs": [-0.1],
    }
    label = {"weight_version": "default"} if adapter else {}

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        more = kept if truncates else {}
        return httpx.Response(200, json=[answer_of([1], **more, **label)] * n)

    transport = httpx.MockTransport(answer)
    async with RolloutClient("router", "http://router", transport=transport) as client:
        client.repeats_prompt = repeats
        client.adapter = adapter
        found = await client.generate(
            [5, 6],
            n=n,
            max_new_tokens=1,
            temperature=1.0,
            stop_token_ids=[],
            parameters={"top_p": 0.9} if truncates else {},
        )
    assert [each.weight_version for each in found] == [4 if adapter else 3] * n
    [body] = bodies
    is_repeated = repeats and n > 1 and (adapter is not None or truncates)
    assert body["input_ids"] == ([[5, 6]] * n if is_repeated else [5, 6])
    assert body["sampling_params"]["n"] == (1 if is_repeated else n)
    assert body.get("lora_path") == (adapter[0] if adapter else None)
    assert ("return_sampling_mask" in body) == truncates


async def test_a_connection_is_direct_and_finds_a_name_that_has_moved() -> None:
    async with Network()._open() as session:
        connector = session.connector
        assert isinstance(connector, aiohttp.TCPConnector)
        assert not connector.use_dns_cache
        assert connector.limit == 0
        assert not session.trust_env
        assert isinstance(session.cookie_jar, aiohttp.DummyCookieJar)


async def test_parsing_that_is_over_keeps_nobody_waiting() -> None:
    async with RolloutClient("router", "http://router") as client:
        await client._may_parse()
        assert client._parsing_ends > 0.0
        await asyncio.sleep(0)
        assert client._parsing_ends == 0.0


def test_an_answer_that_lacks_a_fact_is_told_with_the_facts_that_it_has() -> None:
    answer = answer_of([1])
    del answer["meta_info"]["finish_reason"]
    with raises(GenerationFailed, value="['output_token_logprobs', 'weight_version']") as error:
        completion_from_answer(answer)
    assert "KeyError('finish_reason')" in error.value.message


IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}


@pytest.mark.parametrize(
    ("loads", "works"),
    [
        ([IDLE, IDLE], False),
        ([IDLE, IDLE | {"num_running_reqs": 1}], None),
        ([IDLE | {"num_waiting_reqs": 1}], None),
        ([IDLE | {"num_used_tokens": 1}], None),
        ([], None),
    ],
    ids=str,
)
async def test_a_request_that_no_engine_has_is_lost(
    loads: list[dict[str, int]], works: bool | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(404)
        return httpx.Response(200, json={"loads": loads})

    transport = httpx.MockTransport(answer)
    async with RolloutClient("router", "http://router", transport=transport) as client:
        client.engines.progress = 5
        assert await client._look("attempt") == (works, 5)


@pytest.mark.parametrize("status", [200, 404])
async def test_a_service_that_has_answered_is_no_longer_starting(status: int) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status))
    async with Client("thing", "http://thing", transport=transport) as client:
        assert client.severity == logging.WARNING
        client.start_s = 1e9
        assert client.severity == logging.INFO
        with suppress(ServiceError):
            await client.request("GET", "/")
        assert client.severity == logging.WARNING


class Closable(httpx.AsyncByteStream):
    """A body that knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"x"

    async def aclose(self) -> None:
        self.closed += 1


async def test_a_compressed_answer_to_a_direct_call_is_refused_and_closed() -> None:
    stream = Closable()
    headers = {"content-encoding": "gzip"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=stream))
    async with Client("thing", "http://thing", transport=transport) as client:
        with raises(ServiceError, field="content-encoding", value="gzip"):
            await client.http.get("/")
    assert stream.closed


async def test_engines_that_say_nothing_have_room_for_all() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404))
    async with GeneratingClient("engine", "http://engine", transport=transport) as client:
        assert await client.engines.room() == math.inf


@pytest.mark.parametrize("verdicts", [False, True])
async def test_the_reward_server_says_whether_it_gives_verdicts(verdicts: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/stats"
        return httpx.Response(200, json={"gives_verdicts": verdicts})

    transport = httpx.MockTransport(answer)
    async with RewardClient("reward", "http://reward", transport=transport) as client:
        assert await client.gives_verdicts() is verdicts


def test_after_a_while_of_parsing_other_tasks_run_first() -> None:
    """In one round of the event loop, whose clock a test moves on as parsing would."""
    order: list[str] = []

    async def parse(client: RolloutClient, name: str, loop: Any) -> None:
        await client._may_parse()
        order.append(name)
        loop.now += 0.06

    async def other() -> None:
        order.append("other")

    async def play(loop: Any) -> None:
        client = RolloutClient("router", "http://router")
        async with client, asyncio.TaskGroup() as tasks:
            for name in "abcd":
                tasks.create_task(parse(client, name, loop))
            tasks.create_task(other())

    with simulated(0) as loop:
        loop.run_until_complete(play(loop))
    assert order == ["a", "b", "other", "c", "d"]


async def test_every_answer_that_is_read_here_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []

    async def turn(client: RolloutClient) -> None:
        turns.append(1)

    monkeypatch.setattr(RolloutClient, "_may_parse", turn)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer_of([1])))
    options: Any = {"n": 1, "max_new_tokens": 1, "temperature": 1.0, "stop_token_ids": []}
    async with RolloutClient("router", "http://router", transport=transport) as client:
        assert await client.answers([1], **options) == [answer_of([1])]
        assert len(turns) == 1
        await client.generate([1], **options)
        assert len(turns) == 2


async def test_ground_truths_are_checked_as_they_are() -> None:
    items = [RewardItem(response="", ground_truth=text) for text in ("4", "x")]

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/check_ground_truths"
        assert [each["ground_truth"] for each in json.loads(request.content)["items"]] == ["4", "x"]
        return httpx.Response(200, json={"problems": [{"index": 1, "reason": "no number"}]})

    transport = httpx.MockTransport(answer)
    async with RewardClient("reward", "http://reward", transport=transport) as client:
        [problem] = (await client.check_ground_truths(items)).problems
    assert (problem.index, problem.reason) == (1, "no number")
