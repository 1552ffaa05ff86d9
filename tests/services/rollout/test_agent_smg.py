"""Two rollout nodes as in `test_agent_node`, with smg: an engine and the router are killed
and come back."""

import sys
from collections.abc import Iterator

import psutil
import pytest

from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.process.topology import TRAINER
from tests.support.engines.rollout_nodes import (
    GROUP,
    TRAINER_PORT,
    Cluster,
    generate,
    names,
    requests_served,
    until,
)
from trainer.backends.server import BackgroundServer, create_trainer_app

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="every node gets a loopback address of its own"
    ),
    pytest.mark.slow,  # test_router.py has a shorter version
]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("nodes"), RLHF_ROLLOUT__ROUTER="smg")
    app = create_trainer_app(cluster.board, Metrics("trainer"))
    with BackgroundServer(app, names(2)[f"{TRAINER}-0.{GROUP}"].address, TRAINER_PORT):
        try:
            yield cluster
        finally:
            for node in cluster.nodes:
                node.end()
            cluster.board.close()


async def test_nodes_behind_smg_take_weights_and_survive_kills(cluster: Cluster) -> None:
    await until(
        lambda: all(node.healthy() for node in cluster.nodes), "both nodes healthy", cluster
    )
    cluster.publish("a", 1)
    await until(lambda: cluster.all_serve("a", 1), "weights 1 everywhere", cluster)
    first, second = cluster.nodes
    async with RolloutClient("router", first.router_url, deadline_s=120) as rollout:
        assert {await generate(rollout) for _ in range(4)} == {1}

        starts = second.status()["engine_starts"]
        second.engine().kill()
        assert {await generate(rollout) for _ in range(8)} == {1}  # the other node answers
        await until(
            lambda: second.status()["engine_starts"] == starts + 1, "engine started again", cluster
        )
        await until(lambda: cluster.all_serve("a", 1), "weights 1 everywhere again", cluster)
        before = [requests_served(node) for node in cluster.nodes]
        assert {await generate(rollout) for _ in range(8)} == {1}
        after = [requests_served(node) for node in cluster.nodes]
        assert [new - old for old, new in zip(before, after, strict=True)] == [4, 4]

        router = first.status()["router_pid"]
        psutil.Process(router).children()[0].kill()
        await until(
            lambda: first.status()["router_pid"] not in (None, router), "another router", cluster
        )
        cluster.publish("a", 2)
        await until(lambda: cluster.all_serve("a", 2), "weights 2 everywhere", cluster)
        assert {await generate(rollout) for _ in range(4)} == {2}
