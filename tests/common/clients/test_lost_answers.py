"""When the answer to a call is lost after the work is done, the call is repeated, but the work is
done only once."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from fastapi import FastAPI

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.process.metrics import Metrics
from common.settings.config import Config
from common.settings.sections import ReplaySection, RewardSection
from common.wire.schemas import (
    Completion,
    Group,
    Prompt,
    RewardItem,
    SampleRequest,
    TakeRequest,
    WeightManifest,
    WorkerReport,
)
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.rollout.weights.trainer_client import TrainerClient
from tests.support.processes.lossy_proxy import LossyProxy
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.board import WeightBoard

_C = TypeVar("_C", bound=Client)


@asynccontextmanager
async def lossy(app: FastAPI, kind: Callable[..., _C]) -> AsyncIterator[tuple[_C, LossyProxy]]:
    """Yields a client of a service on a real socket, connected through a proxy that loses
    answers."""
    async with AsyncExitStack() as stack:
        proxy = LossyProxy(stack.enter_context(BackgroundServer(app, "127.0.0.1", 0)).port)
        url = await stack.enter_async_context(proxy.running())
        client = kind("service", url, deadline_s=60)
        stack.push_async_callback(client.close)
        yield client, proxy


def group(name: str, version: int = 0) -> Group:
    completion = Completion(
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.full(3, -1.0, np.float32),
        text="answer",
        finish_reason="stop",
        weight_versions=[(version, 0, 3)],
        reward=1.0,
        correct=True,
    )
    return Group(
        id=name,
        prompt_id="p",
        prompt="1 + 1?",
        ground_truth="2",
        prompt_token_ids=np.array([1, 2], np.int32),
        completions=[completion],
    )


@pytest.mark.parametrize("curriculum", ["none", "difficulty"])
async def test_data(tmp_path: Path, curriculum: str) -> None:
    config = Config(state_dir=tmp_path, data={"source": "tiny", "curriculum": curriculum})
    train = [Prompt(id=f"t/{i}", prompt=f"{i}", ground_truth=f"{i}") for i in range(20)]
    async with lossy(create_data_app(config, train, train[:0]), DataClient) as (client, proxy):
        first = await client.prompts(4, "a")
        second = await client.prompts(4, "b")
        assert (first.position, second.position) == (0, 4)
        assert proxy.forwarded["GET /prompts"] == 3
        if curriculum == "difficulty":
            await client.report_pass_rates([prompt.id for prompt in first.prompts], [0.5] * 4, "a")
            assert proxy.forwarded["POST /pass_rates"] == 2
        await client.seek(2)
        assert proxy.forwarded["POST /seek"] == 2
        assert (await client.prompts(2, "c")).position == 2
        await client.flush()
        assert proxy.forwarded["POST /flush"] == 2
        stats = (await client.request("GET", "/stats")).json()
        assert (stats["position"], stats["prompts_served"]) == (4, 10)
        if curriculum == "difficulty":
            assert stats["curriculum"]["known"] == 0  # the report came after position 2


@pytest.mark.integration
async def test_reward() -> None:
    async with lossy(create_reward_app(RewardSection(workers=1), 1 << 20), RewardClient) as (
        client,
        proxy,
    ):
        items = [
            RewardItem(response="#### 1", ground_truth="1"),
            RewardItem(response="#### 2", ground_truth="1"),
        ]
        assert [result.reward for result in (await client.batch_reward(items)).rewards] == [
            1.0,
            0.0,
        ]
        assert proxy.forwarded["POST /batch_reward"] == 2


async def test_replay(tmp_path: Path) -> None:
    app = create_replay_app(ReplaySection(capacity=100), tmp_path, 1 << 20)
    async with lossy(app, ReplayClient) as (client, proxy):
        await client.add([group(name) for name in "abcd"])
        assert (await client.stats())["added"] == 4
        taken = await client.take(TakeRequest(count=2, request_id="r"))
        assert [each.id for each in taken.groups] == ["a", "b"]
        assert [
            each.id for each in (await client.take(TakeRequest(count=2, request_id="s"))).groups
        ] == ["c", "d"]
        await client.ack(["a", "b", "c"])
        await client.set_priorities({"a": 5.0})
        stats = await client.stats()
        assert (stats["fresh"], stats["leased"], stats["consumed"], stats["max_priority"]) == (
            0,
            1,
            3,
            5.0,
        )
        request = SampleRequest(count=2, max_times_sampled=1, seed=1, request_id="x")
        sampled = await client.sample(request)
        assert proxy.forwarded["POST /groups/sample"] == 2
        assert len(sampled.groups) == len(sampled.weights) == 2
        listed = (await client.request("GET", "/groups")).json()["groups"]
        assert {
            each["id"]: each["times_sampled"] for each in listed if each["times_sampled"]
        } == dict.fromkeys((each.id for each in sampled.groups), 1)
        left = await client.sample(request.model_copy(update={"request_id": "y"}))
        assert {each.id for each in sampled.groups} | {each.id for each in left.groups} == {
            "a",
            "b",
            "c",
        }
        await client.reset_fresh()
        assert proxy.forwarded["POST /groups/reset_fresh"] == 2
        assert (await client.stats())["dropped"] == 1
        for call in ("POST /groups", "POST /groups/ack", "POST /groups/priorities"):
            assert proxy.forwarded[call] == 2


async def test_evictions_reported_by_an_empty_take_are_not_lost(tmp_path: Path) -> None:
    """Without it the collector would never free the slots of these groups, and a run would wait
    forever."""
    app = create_replay_app(ReplaySection(capacity=100), tmp_path, 1 << 20)
    async with lossy(app, ReplayClient) as (client, proxy):
        await client.add([group(name) for name in "ab"])
        assert (
            await client.take(TakeRequest(count=1, min_version=1, request_id="r-1"))
        ).evicted == 2
        assert proxy.forwarded["POST /groups/take"] == 2
        assert (
            await client.take(TakeRequest(count=1, min_version=1, request_id="r-2"))
        ).evicted == 0


async def test_a_sample_is_remembered_through_a_restart(tmp_path: Path) -> None:
    for life in range(2):
        app = create_replay_app(ReplaySection(capacity=100), tmp_path, 1 << 20)
        async with lossy(app, ReplayClient) as (client, _):
            if life == 0:
                await client.add([group(name) for name in "abc"])
                await client.ack(["a", "b", "c"])
            again = await client.sample(SampleRequest(count=2, max_times_sampled=1, request_id="x"))
            if life == 0:
                first = again
    assert [each.id for each in again.groups] == [each.id for each in first.groups]
    np.testing.assert_array_equal(again.weights, first.weights)


async def test_weights(tmp_path: Path) -> None:
    board = WeightBoard(tmp_path / "weights")
    board.announce(WeightManifest(version=3, run_id="run", files=[]))
    report = WorkerReport(
        name="rollout-server-0", url="http://n", num_nodes=1, state="ready", version=3, run_id="run"
    )
    async with lossy(create_trainer_app(board, Metrics("trainer")), TrainerClient) as (
        client,
        proxy,
    ):
        latest = await client.latest(None, 0, 60)
        assert latest is not None
        assert latest.version == 3
        await client.report(report)
        assert board.workers() == [report]
        assert set(proxy.forwarded.values()) == {2}
    board.close()
