"""A real node pulls weights over a slow link: as long as bytes arrive the trainer waits, and a link
that stops is named."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.process.metrics import Metrics
from common.process.topology import TRAINER
from tests.support.engines.rollout_nodes import GROUP, TRAINER_PORT, Cluster, names, until
from tests.support.processes.slow_proxy import SlowProxy
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.board import PublishFailed

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LIMIT_S = 2.0
BYTES_PER_S = 40_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, 1, RLHF_LIMITS__FENCE_AFTER_S=str(LIMIT_S))
    yield cluster
    for node in cluster.nodes:
        node.end()


async def test_a_slow_pull_is_waited_for_and_a_stopped_one_is_named(cluster: Cluster) -> None:
    app = create_trainer_app(cluster.board, Metrics("trainer"))
    host = names(1)[f"{TRAINER}-0.{GROUP}"].address
    with BackgroundServer(app, "127.0.0.1", 0) as server:
        proxy = SlowProxy(server.port, BYTES_PER_S)
        with proxy.running(host, TRAINER_PORT):
            await until(lambda: bool(cluster.reports()), "a report", cluster)
            await until(cluster.nodes[0].healthy, "healthy with the base model", cluster)
            said: list[str] = []

            manifest = cluster.publish("run", 1)
            size = sum(file.size for file in manifest.files)
            assert size / BYTES_PER_S > 5 * LIMIT_S
            board = cluster.board
            fenced = await asyncio.to_thread(board.wait_confirmed, manifest, LIMIT_S, said.append)
            assert fenced == []
            assert cluster.all_serve("run", 1)
            assert any("MB fetched" in line for line in said)

            manifest = cluster.publish("run", 2)
            proxy.stop_after(size / 2)
            with pytest.raises(PublishFailed) as raised:
                await asyncio.to_thread(board.wait_confirmed, manifest, LIMIT_S, said.append)
            text = str(raised.value)
            assert "no progress for 2 s: 0 of 1 rollout nodes serve weights 2" in text
            assert "rollout-server-0 (updating, weights 1)" in text
            assert f"of {size / 1e6:.1f} MB fetched" in text
            assert "limits.fence_after_s" in text
