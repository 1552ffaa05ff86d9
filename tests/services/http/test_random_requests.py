"""What the middleware of every service makes of random requests: who is served, what is counted,
logged and sent back; by the rules, written anew.
"""

import asyncio
import logging
import random
import socket
from collections import Counter
from itertools import product
from typing import Any

import httpx
import pytest
from fastapi import Depends
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import ServiceError
from common.process import logs
from common.process.metrics import Metrics
from common.wire.headers import ASKED_ATTEMPT, ATTEMPT, LOST, STORE_HEADER, WORKING, StoreMark
from services.http import tracing
from services.http.admission import Admission, CallerAuth, Load
from services.http.app import create_app
from services.http.callers import CallerCheck
from services.http.errors import error_response
from services.http.store_rollback import GoingBack
from services.http.tracing import RequestTracing

Headers = list[tuple[bytes, bytes]]


def a_request(path: str = "/work", method: str = "POST", headers: Headers | None = None) -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers or [],
    }


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def unused(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError


class Sent:
    """The messages of one answer."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    def header(self, name: str) -> list[str]:
        return [v.decode() for n, v in self.messages[0]["headers"] if n == name.encode()]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


# ---------------------------------------------------------------- callers

HOSTS = {
    "": True,
    "localhost": True,
    "LocalHost:8000": True,
    "localhost.": True,
    "the-machine": True,
    "THE-MACHINE:1": True,
    "127.0.0.1:80": True,
    "203.0.113.7": True,
    "[::1]:8000": True,
    "[::1]": True,
    "replay-0.demo": True,
    "Replay-0.Demo:8002": True,
    "in-process": True,
    "evil.example": False,
    "localhost.evil.example": False,
    "evil.localhost": False,
    "replay-0.demo.evil.example": False,
    "a.replay-0.demo": False,
    "replay-0xdemo": False,
    "127.0.0.1.evil.example": False,
    "localhost:80:90": False,
    "localhost:port": False,
    "[::1": False,
    "user@localhost": False,
    ":80": False,
}
"""Hosts, and whether they are names or addresses of the service."""
KINDS = {
    None: False,
    "": False,
    "text/plain": False,
    "application/x-www-form-urlencoded": False,
    "application/jsonp": False,
    "text/plain; application/json": False,
    "application/json": True,
    "Application/JSON; charset=utf-8": True,
    "application/msgpack ;x=1": True,
    "application/x-protobuf": True,
}
"""Content types, and whether a page needs a permission to send them."""
SITES = {None: True, "none": True, "same-origin": True, "same-site": False, "cross-site": False}


def drawn_headers(draw: random.Random) -> dict[str, list[str]]:
    """Returns headers, some of which come twice."""
    found: dict[str, list[str]] = {}
    host = draw.choice([name for name, is_own in HOSTS.items() if is_own])
    if draw.random() < 0.25:
        host = draw.choice(list(HOSTS))
    if host or draw.random() < 0.5:
        found["host"] = [host]
    lower = host.lower()
    if draw.random() < 0.4:
        right = [f"http://{lower}", f"https://{host}", f"HTTP://{lower}"]
        wrong = ["null", "", "http://evil.example", f"http://{lower}/", f"http://x{lower}", lower]
        found["origin"] = [draw.choice([*right, *wrong])]
    for name, values in (("sec-fetch-site", SITES), ("content-type", KINDS)):
        value = draw.choice(list(values))
        if value is not None:
            found[name] = [value]
    for name in ("x-request-id", "authorization", "x-run-id", "cookie"):
        if draw.random() < 0.15:
            found[name] = ["value"]
    for name in list(found):
        if draw.random() < 0.1:
            found[name].append(draw.choice(["localhost", "application/json", "none", "evil"]))
    return found


def refused_field(headers: dict[str, list[str]], method: str, path: str) -> str | None:
    """Returns the header for which a request is refused."""
    host = headers.get("host", [""])[0]
    if not HOSTS[host] or len(headers.get("host", [])) > 1:
        return "host"
    if "origin" in headers:
        scheme, _, place = headers["origin"][0].lower().partition("://")
        if not host or not scheme or place != host.lower():
            return "origin"
    changes = method in ("POST", "PUT", "PATCH", "DELETE")
    may_be_opened = path in ("/health", "/metrics", "/docs", "/openapi.json", "/page")
    if not SITES[headers.get("sec-fetch-site", [None])[0]] and (changes or not may_be_opened):
        return "sec-fetch-site"
    permitted = KINDS[headers.get("content-type", [None])[0]]
    permitted |= "x-request-id" in headers or "authorization" in headers
    return None if method != "POST" or permitted else "content-type"


def test_only_what_no_page_of_another_site_can_send_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "Demo")
    monkeypatch.setattr(socket, "gethostname", lambda: "The-Machine")
    check = CallerCheck(frozenset({"/page"}))
    draw = random.Random(1)
    paths = ["/health", "/metrics", "/docs", "/openapi.json", "/page", "/work", "/page/x"]
    outcomes = Counter[object]()
    for _ in range(4000):
        headers = drawn_headers(draw)
        method = draw.choice(["GET", "HEAD", "POST", "POST", "PUT", "PATCH", "DELETE"])
        path = draw.choice(paths)
        listed = [(n.encode(), v.encode()) for n, values in headers.items() for v in values]
        scope = a_request(path, method, listed)
        scope["server"] = ("in-process", 80)
        refusal = check.refusal(scope)
        field = refused_field(headers, method, path)
        assert (refusal and refusal.field) == field, (method, path, headers)
        if refusal is not None:
            wrong_kind = field == "content-type"
            code = "unsupported_media_type" if wrong_kind else "foreign_caller"
            assert (refusal.status, refusal.code) == (415 if wrong_kind else 403, code)
        outcomes[field] += 1
    assert min(outcomes.values()) > 100
    assert len(outcomes) == 5


TOKEN = "0123456789abcdef"  # noqa: S105


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_who_needs_a_token_and_what_they_may_know(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYPILOT_JOBGROUP_NAME", raising=False)
    monkeypatch.delenv("API_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("API_TOKEN", token)
    served: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope)

    auth = CallerAuth(app, frozenset({"/page"}), "/keyed/")
    credentials: dict[str, list[str]] = {
        "none": [],
        "right": [f"Bearer {TOKEN}"],
        "right, in other letters": [f"bEARER  {TOKEN} "],
        "of another scheme": [f"Basic {TOKEN}"],
        "wrong": [f"Bearer {TOKEN[:-1]}"],
        "two, one wrong": [f"Bearer {TOKEN}", "Bearer other"],
        "two, both right": [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
    }
    paths = ("/health", "/page", "/work", "/keyed/x", "/keyed")
    methods = ("GET", "POST")
    for (name, values), path, method in product(credentials.items(), paths, methods):
        headers = [(b"authorization", value.encode()) for value in values]
        sent = Sent()
        served.clear()
        await auth(a_request(path, method, [*headers, (b"x-request-id", b"1")]), nothing, sent)
        known = None if name == "none" else "right" in name
        is_open = method == "GET" and path in ("/health", "/page")
        is_served = (
            token is None or known or (known is None and is_open) or path.startswith("/keyed/")
        )
        assert bool(served) is bool(is_served), (name, path, method)
        if served:
            assert served[0]["known"] is (True if token is None else known)
        else:
            assert (sent.status, sent.header("www-authenticate")) == (401, ["Bearer"])
            assert (b"wrong" in sent.body) is (known is False)
            assert TOKEN.encode() not in sent.body

    served.clear()
    await auth({"type": "lifespan"}, nothing, Sent())
    assert served[0]["known"] is True
    served.clear()
    sent = Sent()
    opening = {"type": "websocket", "path": "/work", "headers": []}
    await auth(opening, nothing, sent)
    refusal = [{"type": "websocket.close", "code": 1008}]
    assert (bool(served), sent.messages) == ((True, []) if token is None else (False, refusal))


# ---------------------------------------------------------------- load


class Calls:
    """Requests in progress, whose bodies come when the test says so."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.admission.app = self.app
        self.running: dict[int, asyncio.Task[None]] = {}
        self.queues: dict[int, asyncio.Queue[Message]] = {}
        self.sent: dict[int, Sent] = {}
        self.number = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["headers"] and scope["headers"][0][0] == b"x-begins":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def begin(self, headers: Headers) -> int:
        self.number += 1
        number = self.number
        queue = asyncio.Queue[Message]()
        self.queues[number] = queue
        self.sent[number] = Sent()
        call = self.admission(a_request(headers=headers), queue.get, self.sent[number])
        self.running[number] = asyncio.create_task(call)
        await self.settle()
        return number

    async def send(self, number: int, size: int, *, more: bool) -> None:
        await self.queues[number].put(
            {"type": "http.request", "body": bytes(size), "more_body": more}
        )
        await self.settle()

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        for number, task in list(self.running.items()):
            if task.done():
                task.result()
                del self.running[number]


@pytest.mark.parametrize("seed", range(30))
async def test_bytes_and_requests_in_progress_are_bounded_exactly(seed: int) -> None:
    draw = random.Random(seed)
    metrics = Metrics("test")
    load = Load(request_limit=4, body_bytes_limit=100)
    admission = Admission(unused, load, max_body_bytes=50, metrics=metrics)
    calls = Calls(admission)
    announced: dict[int, int] = {}
    received: dict[int, int] = {}
    refused = 0

    def held() -> int:
        return sum(max(announced[n], received[n]) for n in announced)

    def outcome(total: int, more: int) -> int | None:
        if total > 50:
            return 413
        return 503 if more > 0 and held() + more > 100 else None

    for _ in range(80):
        if draw.random() < 0.35:
            length = draw.choice([None, 0, 1, 49, 50, 51, draw.randint(0, 50)])
            headers = [] if length is None else [(b"content-length", str(length).encode())]
            expected = outcome(length or 0, length or 0)
            if expected is None and len(announced) >= 4:
                expected = 503
            number = await calls.begin(headers)
            assert calls.sent[number].status == expected
            refused += expected == 503
            if expected is None:
                announced[number] = length or 0
                received[number] = 0
        elif announced:
            number = draw.choice(list(announced))
            size = draw.choice([0, 1, 10, draw.randint(0, 30)])
            more = draw.random() < 0.6
            total = received[number] + size
            expected = outcome(total, max(0, total - max(announced[number], received[number])))
            await calls.send(number, size, more=more)
            status = calls.sent[number].status
            if expected is not None or not more:
                assert status == (expected or 200)
                refused += expected == 503
                del announced[number], received[number]
            else:
                assert status is None
                received[number] = total
        assert load.stats() == {
            "request_limit": 4,
            "body_bytes_limit": 100,
            "requests": len(announced),
            "body_bytes": held(),
            "refused": refused,
        }
    values = {
        sample.name: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.labels
    }
    assert values["rlhf_http_requests_in_progress"] == len(announced)
    assert values["rlhf_http_request_bodies_bytes"] == held()
    assert values["rlhf_http_requests_in_progress_limit"] == 4
    assert values["rlhf_http_request_bodies_limit_bytes"] == 100
    for number in list(announced):
        await calls.send(number, 0, more=False)
    assert (load.requests, load.body_bytes) == (0, 0), "what has ended holds nothing"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/work"])
async def test_probes_are_answered_whatever_the_load(path: str) -> None:
    load = Load(request_limit=0, body_bytes_limit=0)
    calls = Calls(Admission(unused, load, max_body_bytes=50, metrics=Metrics("test")))
    sent = Sent()

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(90)}

    await calls.admission(a_request(path), receive, sent)
    assert sent.status == (503 if path == "/work" else 200)
    assert load.refused == int(path == "/work")


@pytest.mark.parametrize("begins", [False, True])
async def test_an_answer_that_has_begun_gets_no_second_head(begins: bool) -> None:
    load = Load(request_limit=4, body_bytes_limit=100)
    calls = Calls(Admission(unused, load, max_body_bytes=50, metrics=Metrics("test")))
    header = [(b"x-begins", b"1")] if begins else []
    number = await calls.begin(header)
    await calls.send(number, 51, more=True)
    statuses = [each["status"] for each in calls.sent[number].messages if "status" in each]
    assert statuses == ([200] if begins else [413])
    ending = await calls.begin(header)
    other = await calls.begin([])
    load.end()
    await calls.settle()
    statuses = [each["status"] for each in calls.sent[ending].messages if "status" in each]
    assert statuses == ([200] if begins else [503])
    assert (calls.sent[other].status, not calls.running) == (503, True)
    assert (load.requests, load.ended, load.body_bytes) == (0, set(), 0)
    cancelled = await calls.begin([])
    calls.running[cancelled].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls.running[cancelled]
    assert not calls.sent[cancelled].messages, "somebody else's cancellation is passed on"


# ---------------------------------------------------------------- the access log


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(8))
async def test_every_request_is_counted_and_logged_by_the_rules(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    clock = Time()
    monkeypatch.setattr(tracing, "time", clock)
    metrics = Metrics("test")
    level = draw.choice([logging.INFO, logging.DEBUG])
    caplog.set_level("DEBUG", logger="services.http.tracing")
    answer: dict[str, Any] = {}
    inside: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inside.append(logs.request_id())
        clock.now += answer["seconds"]
        if answer["route"]:
            scope["route"] = type("Route", (), {"path": answer["route"]})
        if answer["status"] == "crash":
            raise RuntimeError
        if answer["status"] == "gone":
            raise asyncio.CancelledError
        if answer["status"] >= 400:
            error = ServiceError("no\nway", status=answer["status"])
            await error_response(error, scope)(scope, receive, send)
        else:
            start = {"type": "http.response.start", "status": answer["status"], "headers": []}
            await send(start)

    traced = RequestTracing(app, metrics, level)
    windows: dict[Any, list[float]] = {}
    counts = Counter[tuple[str, str]]()
    seconds = Counter[str]()
    polled = {"/health", "/stats", "/workers/{name}", "/v1/loads", "/metrics", "/where", "/status"}
    routes = ["/work", "/groups/{id}", "/health", "/stats", "/workers/{name}", "/v1/loads", ""]
    for _ in range(300):
        clock.now += draw.choice([0.0, 1.0, 5.0])
        answer = {
            "seconds": draw.choice([0.0, 0.25, 2.0]),
            "route": draw.choice(routes),
            "status": draw.choice([200, 204, 302, 400, 404, 404, 500, 503, 503, "crash", "gone"]),
        }
        method = draw.choice(["GET", "POST"])
        ids = draw.choice([[], ["mine-1"], ["bad id"], ["a", "a"], ["a", "b"], ["x" * 129], [""]])
        listed = [(b"x-request-id", each.encode()) for each in ids]
        listed += [(b"x-run-id", b"run-1")] * draw.randint(0, 2)
        sent = Sent()
        caplog.clear()
        inside.clear()
        try:
            await traced(a_request("/raw path", method, listed), nothing, sent)
        except (RuntimeError, asyncio.CancelledError):
            assert isinstance(answer["status"], str)

        status = {"crash": 500, "gone": 499}.get(answer["status"], answer["status"])
        route = answer["route"] or "unknown"
        counts[route, str(status)] += 1
        seconds[route] += answer["seconds"]
        if ids == ["mine-1"]:
            assert inside == ["mine-1"]
        else:
            assert inside[0] not in ids, "a new one, as that of the client proves nothing"
            assert logs.usable_id(inside[0])
        if sent.messages:
            assert sent.header("x-request-id") == inside

        if status < 400:
            expected = logging.DEBUG if route in polled else level
        elif route == "/health" and status == 503:
            expected = logging.DEBUG
        else:
            # At most ten lines of one kind in the minute that the first of them began.
            now = clock.now
            lines = windows.setdefault((method, route, status), [])
            if lines and now - lines[0] >= 60:
                lines.clear()
            lines.append(now)
            is_bad = status >= 500 and status != 503
            expected = logging.WARNING if is_bad else logging.INFO
            if len(lines) > 10:
                expected = logging.DEBUG
        [line] = caplog.records
        assert line.levelno == expected, answer
        why = ": no way" if isinstance(answer["status"], int) and status >= 400 else ""
        assert line.getMessage() == f"{method} /raw%20path{why}"
        code = "served" if status < 400 else "not_served"
        ms = round(1000 * answer["seconds"])
        assert vars(line)["event"] == {"code": code, "status": status, "ms": ms}

    samples = [each for family in metrics.registry.collect() for each in family.samples]
    found = {
        (each.labels["route"], each.labels["status"]): each.value
        for each in samples
        if each.name == "rlhf_http_requests_total"
    }
    assert found == counts
    sums = {
        each.labels["route"]: each.value
        for each in samples
        if each.name == "rlhf_http_request_duration_seconds_sum"
    }
    assert sums == pytest.approx(dict(seconds))


@pytest.mark.parametrize("seed", range(10))
async def test_a_service_works_on_the_attempts_that_have_not_ended(seed: int) -> None:
    draw = random.Random(seed)
    open_calls: dict[str, asyncio.Event] = {}
    tasks: dict[str, asyncio.Task[None]] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"]
        if name in open_calls:
            await open_calls[name].wait()
            if draw.random() < 0.3:
                raise RuntimeError
        await send({"type": "http.response.start", "status": 200, "headers": []})

    traced = RequestTracing(app, Metrics("test"), logging.DEBUG)
    names = [f"attempt-{number}" for number in range(6)]
    for _ in range(60):
        name = draw.choice(names)
        deed = draw.choice(["begin", "end", "ask"])
        if deed == "begin" and name not in tasks:
            open_calls[name] = asyncio.Event()
            headers = [(ATTEMPT.encode(), name.encode())]
            tasks[name] = asyncio.create_task(
                traced(a_request(name, "GET", headers), nothing, Sent())
            )
            await asyncio.sleep(0)
        elif deed == "end" and name in tasks:
            open_calls.pop(name).set()
            await asyncio.wait({tasks[name]})
            tasks.pop(name).exception()
        else:
            sent = Sent()
            headers = [(ASKED_ATTEMPT.encode(), name.encode())]
            await traced(a_request("/health", "GET", headers), nothing, sent)
            assert sent.header(ASKED_ATTEMPT) == [WORKING if name in tasks else LOST]
            [progress] = sent.header("x-progress")
            assert progress.isdecimal()
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    sent = Sent()
    await traced(a_request("/health", "GET"), nothing, sent)
    assert sent.header(ASKED_ATTEMPT) == sent.header("x-progress") == [], "nobody asked"


# ---------------------------------------------------------------- stores


@pytest.mark.parametrize("seed", range(20))
async def test_a_client_is_refused_that_has_seen_more_of_the_store_or_another_one(
    seed: int,
) -> None:
    draw = random.Random(seed)

    class Store:
        mark = StoreMark(1, 0)
        stored = StoreMark(1, 0)
        reads = 0

        def read_mark(self) -> StoreMark:
            self.reads += 1
            if self.stored.changes < 0:
                raise ServiceError("no file", code="replaced")
            self.mark = self.stored
            return self.mark

    store: Any = Store()
    served = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal served
        served += 1
        store.mark = store.mark._replace(changes=store.mark.changes + 1)
        await Response("done")(scope, receive, send)

    guard = GoingBack(app, store)
    for _ in range(40):
        store.mark = StoreMark(1, draw.randint(0, 4))
        store.stored = StoreMark(1, draw.choice([-1, draw.randint(0, 6)]))
        seen = draw.choice(
            ["", "1", "1-", "x-3", "1-x", f"{draw.randint(1, 2)}-{draw.randint(0, 7)}"]
        )
        identity, _, changes = seen.partition("-")
        more = int(changes) if identity == "1" and changes.isdigit() else -1
        looks = more > store.mark.changes
        is_another = identity == "2" and changes.isdigit()
        expected = 503 if is_another else 200
        if looks:
            expected = 500 if store.stored.changes < 0 else 200
            expected = 409 if 0 <= store.stored.changes < more else expected
        before = served, store.reads
        sent = Sent()
        name = draw.choice([b"x-store-mark", STORE_HEADER.encode()])
        await guard(a_request(headers=[(name, seen.encode())]), nothing, sent)
        assert sent.status == expected
        assert (served, store.reads) == (before[0] + (expected == 200), before[1] + looks)
        assert sent.header(STORE_HEADER) == [str(store.mark)], "that of after the call"
        if expected == 200:
            assert store.mark.changes > 0


# ---------------------------------------------------------------- parameters of the address


async def test_a_parameter_that_nobody_reads_is_refused_wherever_it_stands() -> None:
    app = create_app("thing-server")

    def more(inner: str = "") -> None:
        pass

    def both(outer: str = "", _: None = Depends(more)) -> None:
        pass

    @app.get("/some/{name}")
    def some(name: str, limit: int = 1, _: None = Depends(both)) -> dict[str, int]:
        return {"limit": limit}

    @app.get("/none")
    def none() -> dict[str, int]:
        return {}

    draw = random.Random(3)
    known = ["limit", "outer", "inner"]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for _ in range(60):
            wrong = draw.sample(["name", "Limit", "limits", "size"], draw.choice([0, 0, 1, 2]))
            given = draw.sample(known, draw.randint(0, 3)) + wrong
            draw.shuffle(given)
            answer = await client.get("/some/x", params=dict.fromkeys(given, "7"))
            if not wrong:
                assert answer.json() == {"limit": 7 if "limit" in given else 1}
                continue
            first = next(name for name in given if name in wrong)
            error = answer.json()["error"]
            assert (answer.status_code, error["field"], error["value"]) == (422, first, "7")
            assert (await client.get("/none", params={first: 1})).status_code == 200
