"""The reward-server over HTTP: answers, errors, and a /health that does not wait for workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.clients.reward import RewardClient
from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.app import create_reward_app

pytestmark = pytest.mark.integration

HANG = {
    "prompt": "",
    "response": "\\boxed{\\sum_{i=1}^{1000000000} \\frac{1}{i}}",
    "ground_truth": "x",
}
GOOD = {"prompt": "2+3?", "response": "\\boxed{5}", "ground_truth": "5"}


@asynccontextmanager
async def served(
    config: RewardSection, max_body_bytes: int = 1 << 20
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_reward_app(config, max_body_bytes)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://reward") as http,
    ):
        async with asyncio.timeout(400):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield http


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with served(RewardSection(workers=1, functions=[MathReward(timeout_s=0.3)])) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_legacy_bodies_get_the_legacy_fields(http: httpx.AsyncClient) -> None:
    one = (await http.post("/reward", json=GOOD)).json()
    assert {key: one[key] for key in ("reward", "extracted_answer", "ground_truth", "correct")} == {
        "reward": 1.0,
        "extracted_answer": "5",
        "ground_truth": "5",
        "correct": True,
    }
    assert one["components"] == {"math": 1.0}
    many = (
        await http.post(
            "/batch_reward", json={"items": [GOOD, {**GOOD, "ground_truth": "6"}, GOOD]}
        )
    ).json()
    assert set(many) == {"rewards", "mean_reward", "accuracy"}
    assert many["rewards"][0] == one
    assert [item["reward"] for item in many["rewards"]] == [1.0, 0.0, 1.0]
    assert [item["extracted_answer"] for item in many["rewards"]] == ["5", "5", "5"]
    assert many["mean_reward"] == many["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_client_reads_null_rewards_and_their_status(http: httpx.AsyncClient) -> None:
    transport = http._transport
    async with RewardClient("reward-server", "http://reward", transport=transport) as client:
        answer = await client.batch_reward([RewardItem(**HANG), RewardItem(**GOOD)])
    assert [(result.reward, result.correct, result.status) for result in answer.rewards] == [
        (None, False, "timeout"),
        (1.0, True, "ok"),
    ]
    assert (answer.mean_reward, answer.accuracy) == (1.0, 1.0)


async def test_stats_and_metrics_count_by_status() -> None:
    async with served(RewardSection(functions=[MathReward(timeout_s=0.3)])) as http:
        await http.post(
            "/batch_reward", json={"items": [GOOD, GOOD, {**GOOD, "response": "?"}, HANG]}
        )
        stats = (await http.get("/stats")).json()
        assert stats["graded"] == {
            "ok": 2,
            "unparsable": 1,
            "unevaluated": 0,
            "timeout": 1,
            "died": 0,
            "error": 0,
            "inapplicable": 0,
        }
        page = (await http.get("/metrics")).text
        assert 'rlhf_reward_answers_total{status="timeout"} 1.0' in page
        assert "rlhf_reward_worker_restarts_total 1.0" in page
        assert "rlhf_reward_batch_duration_seconds_count 1.0" in page


def raw(text: str | bytes) -> dict[str, Any]:
    return {"content": text, "headers": {"content-type": "application/json"}}


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/reward", {"json": {"response": 5, "ground_truth": "5"}}, 422, "response"),
    ("/reward", {"json": {"response": "5", "ground_truth": None}}, 422, "ground_truth"),
    ("/reward", {"json": {"response": "5"}}, 422, "ground_truth"),
    ("/reward", {"json": {**GOOD, "ground_truth": ""}}, 422, "ground_truth"),
    ("/reward", {"json": {**GOOD, "ground_truth": "x" * 2000}}, 422, "ground_truth"),
    ("/reward", {"json": {**GOOD, "finish_reason": "never"}}, 422, "finish_reason"),
    ("/reward", {"json": {**GOOD, "typo": 1}}, 422, "typo"),
    ("/reward", raw('{"response": NaN, "ground_truth": "5"}'), 422, "body"),
    ("/reward", raw('{"response": Infinity, "ground_truth": "5"}'), 422, "body"),
    ("/reward", raw(b'{"response": "\xff\xfe", "ground_truth": "5"}'), 422, "body"),
    ("/reward", raw('{"response": "\\ud800", "ground_truth": "5"}'), 422, "body"),
    ("/reward", raw("{"), 422, ""),
    ("/reward", raw(""), 422, ""),
    ("/reward", {"json": [GOOD]}, 422, ""),
    ("/batch_reward", {"json": {"items": []}}, 422, "items"),
    ("/batch_reward", {"json": {"items": GOOD}}, 422, "items"),
    (
        "/batch_reward",
        {"json": {"items": [GOOD, {**GOOD, "ground_truth": " "}]}},
        422,
        "items[1].ground_truth",
    ),
    (
        "/batch_reward",
        {"json": {"items": [GOOD, {**GOOD, "response": ["5"]}]}},
        422,
        "items.1.response",
    ),
    ("/batch_reward", {"json": {"items": [GOOD] * 4097}}, 413, "items"),
    ("/batch_reward", {"json": {"items": [{**GOOD, "response": "x" * 2_000_000}]}}, 413, "body"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "request_", "status", "field"), BAD)
async def test_bad_input_is_named_and_the_service_lives(
    http: httpx.AsyncClient, path: str, request_: dict[str, Any], status: int, field: str
) -> None:
    answer = await http.post(path, **request_)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["remedy"]
    assert field in error.get("field", "")
    assert (await http.post("/reward", json=GOOD)).json()["reward"] == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_text_of_any_kind_is_graded(http: httpx.AsyncClient) -> None:
    for text in (
        "x" * 100_000,
        "9" * 100_000,
        "\\boxed{" + "(" * 100_000,
        "\x00",
        "💥 \\boxed{💥}",
        "\\boxed{\x00}",
        "\u2028",
    ):
        answer = await http.post("/reward", json={**GOOD, "response": text})
        assert answer.status_code == 200, answer.text
        assert not answer.json()["correct"]


async def test_health_and_plain_answers_do_not_wait_while_every_worker_hangs() -> None:
    async with served(RewardSection(workers=2, functions=[MathReward(timeout_s=1000)])) as http:
        hanging = [
            asyncio.create_task(http.post("/batch_reward", json={"items": [HANG] * 4}))
            for _ in range(3)
        ]
        async with asyncio.timeout(400):
            while (await http.get("/stats")).json()["unfinished"] < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for _ in range(20):
            assert (await http.get("/health")).json()["status"] == "healthy"
            assert (await http.post("/reward", json=GOOD)).json()["reward"] == 1.0
            assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert (await http.get("/stats")).json()["unfinished"] == 0


async def test_health_says_why_before_the_graders_are_there() -> None:
    app = create_reward_app(RewardSection(), 1 << 20)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://reward") as http,
    ):
        answer = await http.get("/health")
    assert answer.status_code == 503
    assert "graders" in json.loads(answer.text)["reason"]
