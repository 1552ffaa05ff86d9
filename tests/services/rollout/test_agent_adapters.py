"""A rollout node that follows LoRA adapters, as a real process, loads the newest before traffic,
even after a crash."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.process.metrics import Metrics
from common.process.topology import TRAINER
from common.wire.schemas import WorkerReport, adapter_name
from services.rollout.engine_client import EngineClient
from tests.support.engines.engines import expected_logprobs, write_adapter, write_model
from tests.support.engines.rollout_nodes import GROUP, TRAINER_PORT, Node, names, until
from tests.support.errors import raises
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.board import WeightBoard
from trainer.weights.publisher import Publisher
from trainer.weights.versions import write_version

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the node gets a loopback address of its own"
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
PROMPT = [5, 6, 7]


class Cluster:
    """One node and the trainer's weight server."""

    def __init__(self, directory: Path) -> None:
        self.model = write_model(directory / "model", 0)
        self.adapters = [
            write_adapter(directory / f"adapter{seed}", self.model, seed) for seed in range(4)
        ]
        self.board = WeightBoard(directory / "published")
        self.nodes = [Node(0, 1, directory, self.model)]
        self.fenced: list[WorkerReport] = []

    def publish(self, run_id: str, version: int) -> None:
        """Publishes the adapter with this version."""
        source = self.adapters[version]
        tensors = load_file(source / "adapter_model.safetensors")
        directory = self.board.directory
        self.board.announce(
            write_version(
                tensors.items(), [source / "adapter_config.json"], directory, run_id, version
            )
        )

    def reports(self) -> list[object]:
        return list(self.board.workers())

    def serves(self, run_id: str, version: int) -> bool:
        said = [(report.state, report.run_id, report.version) for report in self.board.workers()]
        return said == [("ready", run_id, version)] and self.nodes[0].healthy()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    address = names(1)[f"{TRAINER}-0.{GROUP}"].address
    with BackgroundServer(
        create_trainer_app(made.board, Metrics("trainer")), address, TRAINER_PORT
    ):
        try:
            yield made
        finally:
            made.nodes[0].end()
            made.board.close()


async def check(cluster: Cluster, rollout: RolloutClient, run_id: str, version: int) -> None:
    """Checks that a request through the router that names this adapter is answered with it."""
    rollout.adapter = (adapter_name(run_id, version), version)
    [completion] = await rollout.generate(
        PROMPT, n=1, max_new_tokens=8, temperature=1, stop_token_ids=[]
    )
    assert completion.weight_versions == [(version, 0, len(completion.token_ids))]
    right = expected_logprobs(
        cluster.model, cluster.adapters[version], PROMPT, completion.token_ids.tolist()
    )
    np.testing.assert_allclose(completion.logprobs, right, rtol=0, atol=1e-4)


@pytest.mark.slow
async def test_a_node_follows_adapters_through_a_crash_and_a_new_run(cluster: Cluster) -> None:
    [node] = cluster.nodes
    async with (
        RolloutClient("router", node.router_url, deadline_s=60) as rollout,
        EngineClient("e", node.engine_url) as engine,
    ):
        for version in (0, 1, 2):
            cluster.publish("a", version)
            await until(lambda v=version: cluster.serves("a", v), f"adapter {version}", cluster)  # type: ignore[misc, arg-type]
            await check(cluster, rollout, "a", version)
        assert set(await engine.adapters()) == {adapter_name("a", 1), adapter_name("a", 2)}
        rollout.adapter = (adapter_name("a", 0), 0)
        with raises(ServiceError, field="lora_path"):
            await rollout.generate(PROMPT, n=1, max_new_tokens=8, temperature=1, stop_token_ids=[])
        starts = node.status()["engine_starts"]
        node.engine().kill()
        await until(
            lambda: node.status()["engine_starts"] == starts + 1,
            "engine started again",
            cluster,  # type: ignore[arg-type]
        )
        await until(lambda: cluster.serves("a", 2), "adapter 2 again", cluster)  # type: ignore[arg-type]
        command = node.engine().cmdline()
        assert command[command.index("--model-path") + 1] == str(cluster.model)
        assert set(await engine.adapters()) == {adapter_name("a", 2)}
        await check(cluster, rollout, "a", 2)
        cluster.publish("b", 1)
        await until(lambda: cluster.serves("b", 1), "adapter 1 of the new run", cluster)  # type: ignore[arg-type]
        assert set(await engine.adapters()) == {adapter_name("b", 1)}
        await check(cluster, rollout, "b", 1)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
async def test_the_publisher_brings_adapters_by_http_and_by_a_shared_disk(
    cluster: Cluster, shared: bool
) -> None:
    [node] = cluster.nodes
    await until(node.healthy, "node healthy", cluster)  # type: ignore[arg-type]
    source = cluster.adapters[1]
    static = [source / "adapter_config.json"]

    def fence(worker: WorkerReport) -> None:
        cluster.fenced.append(worker)

    publisher = Publisher(cluster.board, static, "p", 60, fence, print, shared=shared)
    async with (
        RolloutClient("router", node.router_url, deadline_s=60) as rollout,
        EngineClient("e", node.engine_url) as engine,
    ):
        naming = AdapterPublisher(publisher, rollout, "p")
        for version in (1, 2, 3):
            tensors = load_file(cluster.adapters[version] / "adapter_model.safetensors")
            await asyncio.to_thread(naming.publish, tensors.items(), version)
            assert rollout.adapter == (adapter_name("p", version), version)
            await check(cluster, rollout, "p", version)
        place = Path((await engine.adapters())[adapter_name("p", 3)])
        assert (place.parent == cluster.board.directory.absolute()) == shared
        # A restarted engine that no longer finds the directory fetches the files again before it
        # gets traffic.
        starts = node.status()["engine_starts"]
        node.engine().kill()
        await until(
            lambda: node.status()["engine_starts"] == starts + 1,
            "engine started again",
            cluster,  # type: ignore[arg-type]
        )
        await until(lambda: cluster.serves("p", 3), "adapter 3 again", cluster)  # type: ignore[arg-type]
        await check(cluster, rollout, "p", 3)
    assert not cluster.fenced
