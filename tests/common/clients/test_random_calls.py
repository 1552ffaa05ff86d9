"""What clients send, repeat and make of answers: random services on a virtual clock, against the
rules, written anew.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.clients.base import Client, Unreachable, parse_retry_after, wait_healthy
from common.clients.data import DataClient
from common.clients.engines import Engines
from common.clients.network import Network, Reply, Sent, _pieces, exchange, refuse_compressed
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient, sample_seed, single_seed
from common.clients.unreachable import problem_of, problem_of_status
from common.errors import ServiceError, ServiceLost
from common.process import logs
from common.wire import codec
from common.wire.schemas import Group, RewardItem, SampleRequest, TakeRequest
from tests.simulation.virtual_time import simulated
from tests.support.batches.replay_groups import make_group
from tests.support.errors import raises

REPEATED = {429, 502, 503, 504, 507}


class Service(httpx.AsyncBaseTransport):
    """Answers with what a test drew; notes each request and when it came."""

    def __init__(self, answers: Callable[[httpx.Request], Any]) -> None:
        self.answers = answers
        self.requests: list[httpx.Request] = []
        self.at: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        if request.url.path == "/health":  # a look at a service that is silent or full
            return httpx.Response(200)
        self.requests.append(request)
        self.at.append(time.monotonic())
        answer = self.answers(request)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        assert isinstance(answer, httpx.Response)
        return answer


@pytest.mark.parametrize("seed", range(20))
def test_a_call_is_repeated_only_where_that_may_help_and_each_time_the_same(seed: int) -> None:
    draw = random.Random(seed)
    statuses = [*REPEATED, 500, 400, 401, 404, 409, 422, 413, 200, 201, 204, 299, 300, 302, 199]
    planned: list[Any] = []
    for _ in range(draw.randint(0, 6)):
        status = draw.choice([*REPEATED])
        wait = draw.choice([{}, {"retry-after": draw.choice(["0", "2", "Wed", "-1", "1.5"])}])
        body = b"" if draw.random() < 0.5 else b'{"error": {"code": "full", "message": "later"}}'
        answer: Any = httpx.Response(status, headers=wait, content=body)
        planned.append(draw.choice([answer, answer, httpx.ConnectError("refused"), OSError("x")]))
    last = draw.choice(statuses)
    error = {"code": "of_it", "message": "no", "field": "f", "value": "v", "remedy": "r"}
    planned.append(httpx.Response(last, json={"error": error}))
    answers = iter(planned)
    service = Service(lambda request: next(answers, httpx.Response(200)))
    found: list[Any] = []

    async def play() -> None:
        options: dict[str, Any] = {"params": {"a": "1 ü"}, "headers": {"x-own": "own"}}
        if seed % 2:
            options["json"] = {"text": "ü", "number": 0.1}
        else:
            options["content"] = b"\x00\xffbytes"
        async with Client("thing", "http://thing/base/", transport=service, deadline_s=600) as one:
            with logs.request("the-call", "the-run"):
                try:
                    found.append(await one.request("PUT", "/work", **options))
                except ServiceError as error:
                    found.append(error)

    with simulated(seed) as loop:
        loop.run_until_complete(play())

    count = len(planned) + (last in REPEATED)
    assert len(service.requests) == count
    attempts = set()
    for request in service.requests:
        assert (request.method, request.url.path) == ("PUT", "/base/work")
        assert request.url.query == b"a=1+%C3%BC"
        headers = request.headers
        assert headers["x-request-id"] == "the-call"
        assert headers["x-run-id"] == "the-run"
        assert headers["x-own"] == "own"
        assert headers["accept-encoding"] == "identity"
        assert headers["content-length"] == str(len(request.content))
        attempts.add(headers["x-attempt"])
        if seed % 2:
            assert headers["content-type"] == "application/json"
            assert request.content == '{"text":"ü","number":0.1}'.encode()
        else:
            assert request.content == b"\x00\xffbytes"
    assert len(attempts) == count, "each attempt has an id of its own"

    # Pauses double from 0.05 s to 1 s, half as much again or less; a service may ask for longer.
    for number, answer in enumerate(planned[: count - 1]):
        pause = service.at[number + 1] - service.at[number]
        usual = min(0.05 * 2**number, 1.0)
        text = answer.headers.get("retry-after", "") if isinstance(answer, httpx.Response) else ""
        asked = float(text) if text.isdigit() else 0.0
        assert max(0.5 * usual, asked) <= pause + 1e-6
        assert pause <= max(1.5 * usual, 1.5 * asked) + 1e-6

    [result] = found
    if 200 <= last < 300 or last in REPEATED:
        assert isinstance(result, Reply)
        assert result.status_code == (200 if last in REPEATED else last)
    else:
        assert isinstance(result, ServiceError)
        assert (result.status, result.code, result.message) == (last, "of_it", "thing: no")
        assert (result.field, result.value, result.remedy) == ("f", "v", "r")
        assert (result.request, result.about) == ("the-call", {"service": "thing"})


@pytest.mark.parametrize("status", range(100, 600, 7))
def test_a_status_is_a_success_or_not(status: int) -> None:
    assert Reply(status, {}).is_success is (status // 100 == 2)
    kinds = {401: "unauthorized", 507: "disk_full", 503: "not_ready"}
    assert problem_of_status(status) == kinds.get(status, "error")


@pytest.mark.parametrize("limit_s", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("kind", ["silent", "refuses", "full"])
def test_a_call_ends_at_its_deadline_and_says_why(kind: str, limit_s: float) -> None:
    errors: list[Any] = []
    took: list[float] = []

    def answer(request: httpx.Request) -> Any:
        busy = httpx.Response(503, json={"error": {"code": "full", "message": "no room"}})
        return {"silent": None, "refuses": httpx.ConnectError("Connection refused"), "full": busy}[
            kind
        ]

    service = Service(answer)

    async def play() -> None:
        async with Client("thing", "http://thing", transport=service) as one:
            began = time.monotonic()
            with pytest.raises(Unreachable) as error:
                await one.request("GET", "/work", deadline_s=limit_s)
            errors.append(error.value)
            took.append(time.monotonic() - began)

    with simulated(1) as loop:
        loop.run_until_complete(play())
    [error] = errors
    assert limit_s <= took[0] <= 2 * limit_s + 30
    problem = {"silent": "silent", "refuses": "refused", "full": "not_ready"}[kind]
    assert error.about == {"service": "thing", "problem": problem}
    assert (error.field, error.value) == ("url", "http://thing")
    words = {"silent": "no answer", "refuses": "Connection refused", "full": "HTTP 503: no room"}
    assert words[kind] in error.message
    assert error.request


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("7", 7), ("007", 7), ("", 0), ("-1", 0), ("1.5", 0), ("²", 0), ("٣", 0), ("x", 0)],
)
def test_seconds_of_retry_after(text: str, seconds: float) -> None:
    assert parse_retry_after(Reply(503, {"retry-after": text})) == seconds
    assert parse_retry_after(Reply(503, {})) == 0


# ---------------------------------------------------------------- health


@pytest.mark.parametrize("seed", range(15))
def test_whoever_waits_hears_of_every_service_and_waits_while_they_get_on(seed: int) -> None:
    """Services become healthy after some looks; one may hang, or say that it is lost."""
    draw = random.Random(seed)
    looks: dict[str, int] = {}
    plans: dict[str, dict[str, Any]] = {
        f"service-{number}": {
            "healthy_after": draw.randint(0, 6),
            "moves": draw.random() < 0.8,
            "lost_at": draw.choice([None, None, None, draw.randint(0, 3)]),
            "body": draw.choice(["said", "said", "foreign"]),
        }
        for number in range(draw.randint(1, 3))
    }
    # A service that does not move gets on too slowly if it takes as long as the limit.
    slow = [name for name, plan in plans.items() if draw.random() < 0.15]
    for name in slow:
        plans[name] |= {"healthy_after": 10**9, "moves": False}
    limit_s = 8.0

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.host
        plan = plans[name]
        looks[name] = looks.get(name, 0) + 1
        look = looks[name] - 1
        if look >= plan["healthy_after"]:
            return httpx.Response(200, json={"status": "healthy"})
        if plan["body"] == "foreign":
            return httpx.Response(502, content=b"a proxy")
        lost = plan["lost_at"] is not None and look >= plan["lost_at"]
        said = {"reason": f"loads {name}", "progress": look if plan["moves"] else 1, "lost": lost}
        return httpx.Response(503, json=said)

    outcome: list[Any] = []

    async def play() -> None:
        transport = httpx.MockTransport(answer)
        clients = [Client(name, f"http://{name}", transport=transport) for name in plans]
        began = time.monotonic()
        try:
            await wait_healthy(clients, limit_s, lambda text: None)
            outcome.append(None)
        except ServiceError as error:
            outcome.append(error)
        outcome.append(time.monotonic() - began)
        for client in clients:
            await client.close()

    with simulated(seed) as loop:
        loop.run_until_complete(play())
    error, took = outcome
    is_lost = [
        name
        for name, plan in plans.items()
        if plan["body"] == "said"
        and plan["lost_at"] is not None
        and plan["lost_at"] < plan["healthy_after"]
    ]
    if is_lost:
        assert isinstance(error, ServiceLost)
        assert error.about["service"] in is_lost
    elif slow:
        assert isinstance(error, Unreachable)
        assert error.about["service"] in slow
        assert limit_s <= took <= limit_s + 2.0
        for name in slow:
            assert f"{name} at http://{name} (" in error.message
            reason = f"loads {name}" if plans[name]["body"] == "said" else "HTTP 502"
            assert reason in error.message
        assert all(name in slow or name not in error.message for name in plans)
    else:
        assert error is None
        for name, plan in plans.items():
            assert looks[name] == plan["healthy_after"] + 1, "none is asked again that is healthy"


# ---------------------------------------------------------------- bodies of calls


class Recorder:
    """A service in which nothing fails; it answers what each call needs."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, str, dict[str, str], bytes]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().partition("?")[0]
        params = dict(request.url.params)
        self.calls.append((request.method, path, params, request.content))
        answer = self.answers.get(path, {})
        if isinstance(answer, bytes):
            return httpx.Response(200, content=answer)
        return httpx.Response(200, json=answer)


async def test_calls_of_the_data_server_have_every_argument() -> None:
    prompt = {"id": "p", "prompt": "1+1?", "ground_truth": "2"}
    service = Recorder({"/eval_prompts": {"prompts": [prompt]}, "/train_prompts": {"prompts": []}})
    service.answers["/stats"] = {"a": 1}
    batch = {"prompts": [prompt], "total_available": 1, "epoch": 0, "position": 5}
    service.answers["/prompts"] = batch
    transport = httpx.MockTransport(service)
    async with DataClient("data", "http://data", transport=transport) as data:
        assert (await data.prompts(3, "id-0")).position == 5
        assert [each.id for each in await data.eval_prompts(7)] == ["p"]
        await data.eval_prompts(7, 3)
        assert await data.train_prompts(5, 9) == []
        await data.seek(11)
        await data.seek(12, "id-1", "run-1")
        await data.report_pass_rates(("a", "b"), (0.5, 1.0), "id-2")
        assert await data.stats() == {"a": 1}
    seen = [(method, path, params) for method, path, params, _ in service.calls]
    assert seen == [
        ("GET", "/prompts", {"batch_size": "3", "shuffle": "true", "request_id": "id-0"}),
        ("GET", "/eval_prompts", {"limit": "7", "offset": "0"}),
        ("GET", "/eval_prompts", {"limit": "7", "offset": "3"}),
        ("GET", "/train_prompts", {"limit": "5", "offset": "9"}),
        ("POST", "/seek", {}),
        ("POST", "/seek", {}),
        ("POST", "/pass_rates", {}),
        ("GET", "/stats", {}),
    ]
    bodies = [json.loads(content) for *_, content in service.calls if content]
    assert bodies == [
        {"position": 11, "request_id": None, "replaces": ""},
        {"position": 12, "request_id": "id-1", "replaces": "run-1"},
        {"prompt_ids": ["a", "b"], "pass_rates": [0.5, 1.0], "request_id": "id-2"},
    ]


async def test_calls_of_the_replay_buffer_have_every_argument() -> None:
    groups = [make_group("g 1/x"), make_group("b")]
    taken = codec.encode({"groups": [], "evicted": 3, "ids": ["b"]})
    sampled = codec.encode({"groups": [], "weights": b""})
    service = Recorder(
        {
            "/groups": {"added": 2, "groups": [{"id": "b"}]},
            "/groups/take": taken,
            "/groups/sample": sampled,
            "/groups/reset_fresh": {"dropped": 4},
            "/stats": {"fresh": 0},
        }
    )
    service.answers["/groups/g%201%2Fx"] = codec.plain(groups[0])
    transport = httpx.MockTransport(service)
    async with ReplayClient("replay", "http://replay", transport=transport) as replay:
        assert await replay.add(groups) == 2
        request = TakeRequest(count=2, request_id="r", min_version=5, ids_only=True)
        answer = await replay.take(request)
        assert (answer.ids, answer.evicted) == (["b"], 3)
        await replay.ack(["b", "a"])
        await replay.sample(SampleRequest(count=3, seed=4))
        await replay.set_priorities({"z": 0.5, "a": 2.0, "m": 1.0}, "id")
        assert await replay.reset_fresh() == 4
        await replay.reset_fresh(0, 0, "run")
        await replay.reset_fresh(3, None, None)
        assert await replay.listing("fresh") == [{"id": "b"}]
        await replay.listing("leased", 5)
        found: Group = await replay.group("g 1/x")
        assert found.id == "g 1/x"
        assert await replay.stats() == {"fresh": 0}
    methods = [(method, path, params) for method, path, params, _ in service.calls]
    assert methods == [
        ("POST", "/groups", {}),
        ("POST", "/groups/take", {}),
        ("POST", "/groups/ack", {}),
        ("POST", "/groups/sample", {}),
        ("POST", "/groups/priorities", {}),
        ("POST", "/groups/reset_fresh", {}),
        ("POST", "/groups/reset_fresh", {"from_position": "0", "step": "0", "run_id": "run"}),
        ("POST", "/groups/reset_fresh", {"from_position": "3"}),
        ("GET", "/groups", {"state": "fresh", "limit": "1000"}),
        ("GET", "/groups", {"state": "leased", "limit": "5"}),
        ("GET", "/groups/g%201%2Fx", {}),
        ("GET", "/stats", {}),
    ]
    bodies = [content for *_, content in service.calls]
    assert [group.id for group in codec.decode_groups(bodies[0])] == ["g 1/x", "b"]
    assert json.loads(bodies[1])["min_version"] == 5
    assert json.loads(bodies[1])["ids_only"] is True
    assert json.loads(bodies[2]) == {"ids": ["b", "a"]}
    assert (json.loads(bodies[3])["count"], json.loads(bodies[3])["seed"]) == (3, 4)
    assert json.loads(bodies[4]) == {
        "ids": ["z", "a", "m"],
        "priorities": [0.5, 2.0, 1.0],
        "request_id": "id",
    }


@pytest.mark.parametrize("seed", range(10))
async def test_every_batch_gets_its_own_grades(seed: int) -> None:
    draw = random.Random(seed)
    batches = [
        [
            RewardItem(prompt="?", response=f"{n}.{i}", ground_truth="1")
            for i in range(draw.randint(0 if n else 1, 3))
        ]
        for n in range(draw.randint(1, 4))
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        items = json.loads(request.content)["items"]
        usual = {"extracted_answer": None, "ground_truth": "1", "correct": False, "status": "ok"}
        rewards = [{"reward": float(item["response"]), **usual} for item in items]
        return httpx.Response(200, json={"rewards": rewards, "mean_reward": 0, "accuracy": 0})

    transport = httpx.MockTransport(answer)
    async with RewardClient("reward", "http://reward", transport=transport) as reward:
        graded = await reward.grade_all(batches)
    assert [[each.reward for each in batch] for batch in graded] == [
        [float(item.response) for item in batch] for batch in batches
    ]


# ---------------------------------------------------------------- the router and its engines


@pytest.mark.parametrize(
    ("status", "code", "repeated"),
    [
        (500, "call_upstream_failed", True),
        (500, "call_upstream_", True),
        (500, "read_response_body_failed", True),
        (404, "model_not_found", True),
        (500, "x_call_upstream_failed", False),
        (500, "", False),
        (404, "", False),
        (503, "", True),
        (429, "", True),
    ],
)
def test_errors_of_the_router_by_their_code(status: int, code: str, repeated: bool) -> None:
    client = RolloutClient.__new__(RolloutClient)
    assert client._is_retryable(Reply(status, {"x-smg-error-code": code})) is repeated
    assert client._is_retryable(Reply(status, {})) is (status in REPEATED)


@pytest.mark.parametrize("seed", range(15))
async def test_an_engine_is_removed_once_and_whoever_removed_it(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.sample("abcdef", draw.randint(0, 5))
    listed = [
        {"id": f"id {name}", "url": f"http://{name}" + "/" * draw.randint(0, 1)} for name in names
    ]
    wanted = f"http://{draw.choice('abc')}" + "/" * draw.randint(0, 1)
    status = draw.choice([200, 202, 404, 400])
    deleted: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            assert request.url.path == "/workers"
            return httpx.Response(200, json={"workers": listed})
        deleted.append(request.url.path)
        return httpx.Response(status, json={"error": "no"})

    transport = httpx.MockTransport(answer)
    expected = [
        f"/workers/{each['id']}" for each in listed if each["url"].strip("/") == wanted.strip("/")
    ]
    async with RolloutClient("router", "http://router", transport=transport) as router:
        if expected and status == 400:
            with raises(ServiceError, status=400):
                await router.remove_worker(wanted)
        else:
            await router.remove_worker(wanted)
    assert deleted == expected


LOADS = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}


@pytest.mark.parametrize("seed", range(15))
async def test_engines_are_those_that_the_router_lists_now(seed: int) -> None:
    """By looks: who was asked, whether one of them is silent, and how often one has got on."""
    draw = random.Random(seed)
    asked: list[str] = []
    listed: list[dict[str, Any]] = []
    answers: dict[str, Any] = {}
    listing = 200

    async def get(url: str) -> Reply:
        asked.append(url)
        if url == "/workers":
            return Reply(listing, {}, json.dumps({"workers": listed}).encode())
        answer = answers[url.removesuffix("/v1/loads")]
        if isinstance(answer, Exception):
            raise answer
        return Reply(200, {}, answer)

    engines = Engines(get)
    marks: dict[str, Any] = {}
    progress = 0
    for _ in range(12):
        names = draw.sample("abcd", draw.randint(0, 4))
        listed = [
            {"url": f"http://{name}" + "/" * draw.randint(0, 1), "is_healthy": draw.random() < 0.7}
            for name in names
        ]
        answers = {}
        states: dict[str, Any] = {}
        for each in listed:
            url = each["url"].rstrip("/")
            load = LOADS | {
                "num_running_reqs": draw.randint(0, 1),
                "num_waiting_reqs": draw.randint(0, 3),
                "computed_tokens": draw.randint(0, 1),
            }
            states[url] = load if each["is_healthy"] else None
            body = json.dumps({"loads": [load]}).encode()
            answers[url] = body
            if draw.random() < 0.15:
                error = draw.choice([httpx.ConnectError("x"), TimeoutError(), OSError()])
                answers[url] = draw.choice([error, b"404 page", b'{"loads": []}'])
                states[url] = answers[url] if each["is_healthy"] else None
        asked.clear()
        found = await engines.look(0.0)
        healthy = [each["url"].rstrip("/") for each in listed if each["is_healthy"]]
        assert asked == ["/workers", *(f"{url}/v1/loads" for url in healthy)]
        silent = any(isinstance(states[url], Exception) for url in healthy)
        loads = [states[url] for url in healthy if isinstance(states[url], dict)]
        for url in healthy:
            if isinstance(states[url], dict):
                mark = (states[url]["num_running_reqs"], states[url]["computed_tokens"])
                progress += url in marks and marks[url] != mark
                marks[url] = mark
        assert engines.progress == progress
        if silent:
            assert found is None
        else:
            assert found is not None
            assert [each.num_waiting_reqs for each in found] == [
                each["num_waiting_reqs"] for each in loads
            ]
    asked.clear()
    await engines.look(1000.0)
    assert asked == [], "it is fresh"


@pytest.mark.parametrize("status", [404, 405, 500])
async def test_a_server_that_is_no_router_is_the_only_engine(status: int) -> None:
    asked: list[str] = []

    async def get(url: str) -> Reply:
        asked.append(url)
        if url == "/workers":
            return Reply(status, {}, b"{}")
        return Reply(200, {}, json.dumps({"loads": [LOADS]}).encode())

    engines = Engines(get)
    first = await engines.look(0.0)
    await engines.look(0.0)
    if status == 500:  # a router that fails lists nobody
        assert (asked, first) == (["/workers"] * 2, [])
    else:
        assert asked == ["/workers", "/v1/loads", "/v1/loads"]
        assert len(first or []) == 1


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
async def test_completions_with_seeds_are_asked_for_apart_or_together(
    apart: bool, seed: int | None
) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/generate"
        body = json.loads(request.content)
        bodies.append(body)
        one = {"text": str(body["sampling_params"].get("sampling_seed"))}
        return httpx.Response(200, json=[one] * body["sampling_params"]["n"])

    transport = httpx.MockTransport(answer)
    async with RolloutClient("router", "http://router", transport=transport) as router:
        router.seeds_apart = apart
        answers = await router.answers(
            [1, 2],
            n=3,
            max_new_tokens=9,
            temperature=0.5,
            stop_token_ids=(7, 8),
            sampling_seed=seed,
            parameters={"top_p": 0.5},
            lora_path="adapter",
        )
    sampling: dict[str, Any] = {
        "n": 3,
        "max_new_tokens": 9,
        "temperature": 0.5,
        "stop_token_ids": [7, 8],
        "skip_special_tokens": True,
        "top_p": 0.5,
    }
    usual = {
        "input_ids": [1, 2],
        "return_logprob": True,
        "stream": False,
        "return_sampling_mask": True,
        "lora_path": "adapter",
    }
    if seed is None:
        expected = [usual | {"sampling_params": sampling}]
    elif not apart:
        expected = [usual | {"sampling_params": sampling | {"sampling_seed": seed}}]
    else:
        # A stride, modulo 2^64, of which SGLang takes 31 bits.
        seeds = [(seed + i * 0xD1B54A32D192ED03) % 2**64 % 2**31 for i in range(3)]
        expected = [
            usual | {"sampling_params": sampling | {"n": 1, "sampling_seed": one}} for one in seeds
        ]
        assert seeds == [single_seed(seed, i) for i in range(3)]
        assert [each["text"] for each in answers] == [str(one) for one in seeds], "in their order"
        assert len({sample_seed(seed, i) for i in range(100)}) == 100
    assert sorted(bodies, key=str) == sorted(expected, key=str)


# ---------------------------------------------------------------- bodies in pieces


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200_000, 262_144])
async def test_the_pieces_of_a_body_are_the_body(size: int) -> None:
    content = random.Random(size).randbytes(size)
    moved: list[int] = []
    parts = [part async for part in _pieces(content, moved.append)]
    assert b"".join(parts) == content
    assert all(0 < len(part) <= 65536 for part in parts)
    assert moved == list(range(0, size, 65536))


class Answer:
    """An answer of aiohttp."""

    def __init__(
        self, status: int, content: bytes, length: int | None, draw: random.Random
    ) -> None:
        self.status = status
        self.headers = {"x-a": "b"}
        self.content_length = length
        self.content = self
        self.released = 0
        self.whole_reads = 0
        self._bytes = content
        self._draw = draw

    async def __aenter__(self) -> "Answer":
        return self

    async def read(self) -> bytes:
        self.whole_reads += 1
        return self._bytes

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        at = 0
        while at < len(self._bytes):
            piece = min(size, self._draw.randint(1, 1 << 19))
            yield self._bytes[at : at + piece]
            at += piece

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("seed", range(20))
async def test_an_answer_is_read_whole_into_memory_or_a_file(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    size = draw.choice([0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 5])
    content = draw.randbytes(size)
    status = draw.choice([200, 201, 204, 299, 300, 404, 500])
    answer = Answer(status, content, draw.choice([None, size]), draw)
    network = Network()
    monkeypatch.setattr(network, "_call", lambda *given, **options: answer)
    moved: list[int] = []
    path = tmp_path / "body"

    async def to_file(pieces: Any) -> Path:
        with path.open("wb") as file:
            async for piece in pieces:
                file.write(piece)
        return path

    receives = draw.random() < 0.5
    receive: Callable[[Any], Awaitable[Path]] | None = to_file if receives else None
    sent = Sent("POST", "http://x", {}, b"12345", 1.0, moved.append, receive)
    reply = await exchange(network, sent)
    assert (reply.status_code, reply.headers) == (status, {"x-a": "b"})
    if receives and status < 300:
        assert (reply.file, reply.content) == (path, b"")
        assert path.read_bytes() == content
    else:
        assert (reply.file, reply.content) == (None, content)
    assert answer.released == 1
    assert moved == sorted(moved)
    if size:
        assert moved[-1] == 5 + size, "both bodies"
    assert answer.whole_reads <= int(size < 1 << 20)


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity"])
async def test_a_compressed_answer_is_refused_and_its_connection_released(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer(200, b"x", 1, random.Random(0))
    answer.headers = {"content-encoding": encoding}
    network = Network()
    monkeypatch.setattr(network, "_call", lambda *given, **options: answer)
    sent = Sent("GET", "http://x", {}, b"", 1.0, lambda size: None, None)
    with raises(ServiceError, field="content-encoding", value=encoding):
        await exchange(network, sent)
    assert answer.released == 1
    refuse_compressed({"content-encoding": ""})


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError("[Errno -2] Name or service not known"), "unknown_name"),
        (httpx.ConnectError("DNS server returned answer with no data"), "unknown_name"),
        (OSError(28, "No space left on device"), "disk_full"),
        (OSError("Connect call failed ('10.0.0.1', 80)"), "refused"),
        (httpx.ReadTimeout(""), "silent"),
        (TimeoutError(), "silent"),
        (OSError("Connection reset by peer"), "silent"),
        (OSError("Server disconnected"), "silent"),
        (ValueError("other"), "error"),
        (ServiceLost("gone"), "lost"),
        (ServiceError("x", code="certificate"), "certificate"),
        (ServiceError("x", status=401), "unauthorized"),
        (ServiceError("x", status=507), "disk_full"),
        (ServiceError("x", status=503, about={"problem": "refused"}), "refused"),
        (ServiceError("x", status=503), "not_ready"),
        (ServiceError("x", status=418), "error"),
    ],
    ids=repr,
)
def test_the_kind_of_a_problem(error: Exception, problem: str) -> None:
    assert problem_of(error) == problem
