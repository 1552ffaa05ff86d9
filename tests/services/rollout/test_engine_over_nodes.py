"""Real SGLang as one engine over two nodes, each with its own agent: generation, weights in every
way, and what happens when the second node is lost.
"""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from torch import Tensor

from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.process.topology import Topology
from tests.support.engines.engines import PLUGIN, SGLANG, sglang_is_installed, write_model
from tests.support.engines.rollout_nodes import TRAINER_PORT, generate
from tests.support.engines.synced_nodes import ADDRESS, SyncedNodes
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.comparison import Checksums

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not sglang_is_installed(), reason="SGLang is not installed"),
]
SETTINGS = {
    "RLHF_ROLLOUT__ENGINE": "sglang",
    "RLHF_ROLLOUT__DEVICE": "cpu",
    "RLHF_ROLLOUT__ENGINE_PYTHON": str(SGLANG / "bin" / "python"),
    "RLHF_ROLLOUT__TENSOR_PARALLEL_SIZE": "2",
    "RLHF_ROLLOUT__NODES_PER_ENGINE": "2",
    "RLHF_ROLLOUT__MAX_RUNNING_REQUESTS": "16",
    "PYTHONPATH": str(PLUGIN),
}


class EngineOverNodes(SyncedNodes):
    """Two nodes that form one engine, and the publishing side of a trainer."""

    patience_s = 900.0

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, **SETTINGS)

    def write_model(self) -> None:
        """Writes a model whose heads two ranks can share."""
        write_model(self.model, seed=0)

    def serves(self, run_id: str, version: int) -> bool:
        """Whether the one engine reports this version to the trainer, and gets traffic."""
        reports = [(each.name, each.state, each.run_id, each.version) for each in self.reports()]
        is_served = reports == [("rollout-server-0", "ready", run_id, version)]
        return is_served and self.routed() == {self.nodes[0].engine_url}

    def starts(self) -> list[int]:
        return [node.status()["engine_starts"] for node in self.nodes]

    def differences(self, weights: dict[str, Tensor]) -> list[str]:
        """Returns the parameters of both ranks that are not made of these weights."""
        answer = httpx.post(
            f"{self.nodes[0].engine_url}/weights_checker",
            json={"action": "checksum"},
            timeout=60,
            trust_env=False,
        ).json()
        ranks = [rank["checksums"] for rank in answer["ranks"]]
        assert len(ranks) == 2
        found = Checksums(on_gpu=False).compare(weights, ranks)
        assert found.compared == len(weights)
        return found.wrong


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOverNodes]:
    os.environ.update(Topology().loopback_env())
    engine = EngineOverNodes(tmp_path_factory.mktemp("nodes"))
    app = create_trainer_app(engine.board, Metrics("trainer"))
    with BackgroundServer(app, ADDRESS, TRAINER_PORT):
        try:
            engine.until(engine.healthy, "both nodes healthy")
            yield engine
        finally:
            for node in engine.nodes:
                node.end()
            engine.board.close()


@pytest.fixture
async def rollout(engine: EngineOverNodes) -> AsyncIterator[RolloutClient]:
    async with RolloutClient("rollout", engine.nodes[0].router_url) as client:
        yield client


@pytest.mark.parametrize("way", ["http", "shared", "distributed"])
async def test_both_nodes_get_the_weights_of_a_version(
    engine: EngineOverNodes, rollout: RolloutClient, way: str
) -> None:
    publisher = engine.publisher(way, way)
    for version in (1, 2):
        weights = engine.weights()
        publisher.publish(weights.items(), version)
        engine.until(partial(engine.serves, way, version), f"weights {version}")
        assert engine.differences(weights) == []
        assert await generate(rollout) == version
    if way == "distributed":
        assert engine.announced().world_size == 3


async def test_the_engine_is_started_again_on_both_nodes_when_the_second_ones_process_dies(
    engine: EngineOverNodes, rollout: RolloutClient
) -> None:
    weights = engine.weights()
    engine.publisher("killed", "http").publish(weights.items(), 1)
    before = engine.starts()
    schedulers = [
        process
        for process in psutil.Process(engine.nodes[1].status()["engine_pid"]).children(True)
        if process.name().startswith("sglang::sched")
    ]
    schedulers[0].kill()
    engine.until(lambda: engine.starts() == [count + 1 for count in before], "both started again")
    engine.until(lambda: engine.serves("killed", 1) and engine.healthy(), "weights 1 again")
    assert engine.differences(weights) == []
    assert await generate(rollout) == 1
    said = engine.nodes[0].output.read_text()
    assert "rollout-server-1: the process " in said


async def test_a_node_that_is_lost_is_named_and_takes_part_again_when_it_is_back(
    engine: EngineOverNodes, rollout: RolloutClient
) -> None:
    weights = engine.weights()
    engine.publisher("lost", "http").publish(weights.items(), 1)
    os.killpg(engine.nodes[1].process.pid, signal.SIGKILL)
    engine.nodes[1].process.wait()

    def named() -> bool:
        details = [report.detail for report in engine.reports()]
        return any("waits for rollout-server-1 (does not report)" in each for each in details)

    engine.until(named, "the lost node is named to the trainer")
    assert engine.routed() == set()
    health = engine.nodes[0].get("/health")
    assert health.status_code == 503
    assert "rollout-server-1" in health.json()["reason"]

    engine.nodes[1] = engine.start(1)
    engine.until(lambda: engine.serves("lost", 1) and engine.healthy(), "weights 1 again")
    assert engine.differences(weights) == []
    assert await generate(rollout) == 1
