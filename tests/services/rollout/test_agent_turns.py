"""A rollout node takes turns on a GPU with the trainer (`rollout.colocate`), in real processes that
may be killed."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.process.topology import TRAINER
from common.wire.schemas import WeightManifest, WorkerReport
from services.rollout.engine_client import EngineClient
from tests.support.engines.rollout_nodes import (
    GROUP,
    TRAINER_PORT,
    Cluster,
    Node,
    generate,
    names,
    until,
)
from tests.support.errors import raises
from tests.support.processes.processes import alive
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.board import PublishFailed, WeightBoard

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="every node gets a loopback address of its own"
    ),
]
LIMIT_S = 400.0


def trainer(cluster: Cluster) -> BackgroundServer:
    """Returns a trainer's server; each has its own board."""
    cluster.board = WeightBoard(cluster.directory / "published")
    address = names(1)[f"{TRAINER}-0.{GROUP}"].address
    return BackgroundServer(
        create_trainer_app(cluster.board, Metrics("trainer")), address, TRAINER_PORT
    )


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, 1, RLHF_ROLLOUT__COLOCATE="true")
    try:
        yield cluster
    finally:
        cluster.nodes[0].end()


def says(cluster: Cluster, state: str) -> bool:
    return [report.state for report in cluster.reports()] == [state]


def generating(node: Node) -> bool | None:
    """Returns whether the engine generates, or None without an engine."""
    with suppress(httpx.TransportError):
        answer = httpx.get(node.engine_url + "/server_info", timeout=10, trust_env=False)
        return not answer.json()["internal_states"][0]["paused"]
    return None


@pytest.mark.slow
async def test_the_engine_is_awake_only_while_a_trainer_says_so(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with trainer(cluster):
        await until(lambda: says(cluster, "asleep"), "the node waits for its turn", cluster)
        assert (
            node.status()["engine_pid"] is None
        )  # a trainer that loads its model has the GPU to itself
        cluster.publish("a", 0)
        await until(lambda: cluster.all_serve("a", 0), "the first version", cluster)

        await asyncio.to_thread(cluster.board.sleep, LIMIT_S)
        assert generating(node) is False
        async with RolloutClient("router", node.router_url, deadline_s=60) as rollout:
            waiting = asyncio.create_task(generate(rollout))  # the request waits instead of failing
            cluster.publish("a", 1)
            assert await waiting == 1
        await until(lambda: cluster.all_serve("a", 1), "the second version", cluster)
        assert node.status()["engine_starts"] == 1

        await asyncio.to_thread(cluster.board.sleep, LIMIT_S)
        node.engine().send_signal(signal.SIGKILL)  # the engine dies while asleep
        await until(lambda: node.status()["engine_starts"] == 2, "the agent has noticed", cluster)
        await asyncio.to_thread(cluster.board.sleep, LIMIT_S)
        assert node.status()["engine_pid"] is None
        cluster.publish("a", 2)
        await until(
            lambda: cluster.all_serve("a", 2), "a new engine with the third version", cluster
        )
        cluster.board.close()
    await until(
        lambda: generating(node) is False, "no trainer: the GPU is free for the next one", cluster
    )
    with trainer(cluster):
        await until(lambda: says(cluster, "asleep"), "the node waits for its turn", cluster)
        cluster.publish("b", 0)
        await until(
            lambda: cluster.all_serve("b", 0), "the first version of the next trainer", cluster
        )
        assert node.status()["engine_starts"] == 2
        cluster.board.close()


@pytest.mark.slow
async def test_an_engine_that_keeps_its_memory_is_killed(cluster: Cluster) -> None:
    """The engine refuses to release memory that another client has already made it release; SGLang
    would exit."""
    node = cluster.nodes[0]
    with trainer(cluster):
        cluster.publish("a", 0)
        await until(lambda: cluster.all_serve("a", 0), "the first version", cluster)
        engine = node.engine()
        async with EngineClient("engine", node.engine_url) as other:
            await other.sleep(["kv_cache"], LIMIT_S)
        await asyncio.to_thread(cluster.board.sleep, LIMIT_S)
        assert not alive(engine.pid)
        assert node.status()["engine_pid"] is None
        assert "it did not release its memory" in node.output.read_text()
        cluster.publish("a", 1)
        await until(lambda: cluster.all_serve("a", 1), "the second version", cluster)
        assert node.status()["engine_starts"] == 2
        cluster.board.close()


@pytest.mark.slow
async def test_a_killed_agent_takes_its_engine_along_and_waits_for_its_turn(
    cluster: Cluster,
) -> None:
    node = cluster.nodes[0]
    with trainer(cluster):
        cluster.publish("a", 0)
        await until(lambda: cluster.all_serve("a", 0), "the first version", cluster)
        await asyncio.to_thread(cluster.board.sleep, LIMIT_S)
        engine = node.engine()
        node.process.kill()
        node.process.wait()
        await until(lambda: not alive(engine.pid), "the engine ends with its agent", cluster)
        cluster.nodes[0] = node = Node(
            0, 1, cluster.directory, cluster.model, RLHF_ROLLOUT__COLOCATE="true"
        )
        await asyncio.to_thread(cluster.board.sleep, LIMIT_S)
        assert node.status()["engine_pid"] is None
        cluster.publish("a", 1)
        await until(lambda: cluster.all_serve("a", 1), "the second version", cluster)
        cluster.board.close()


def test_a_trainer_does_not_update_beside_an_engine_that_keeps_its_memory(tmp_path: Path) -> None:
    board = WeightBoard(tmp_path)

    board.announce(WeightManifest(version=1, run_id="a"))
    for state in ("ready", "asleep"):  # the second report is stale, from an earlier turn
        board.report(
            WorkerReport(
                name="rollout-server-0", url="http://e", num_nodes=1, state=state, version=1
            )
        )
        with raises(PublishFailed, field="limits.fence_after_s", value="0.1") as caught:
            board.sleep(0.1)
        assert f"rollout-server-0 ({state}, weights 1)" in caught.value.message
