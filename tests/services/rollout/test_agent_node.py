"""Two rollout nodes in real processes, with real engines, agents and router, and the trainer's own
weight server."""

import operator
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator

import httpx
import psutil
import pytest
import torch

from common.clients.rollout import RolloutClient
from common.process.topology import Topology
from common.weights.checksums import checksum
from tests.support.engines.rollout_nodes import (
    Node,
    flip_last_byte,
    generate,
    requests_served,
    until,
)
from tests.support.engines.synced_nodes import SyncedNodes, sums

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="every node gets a loopback address of its own"
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncedNodes]:
    os.environ.update(Topology().loopback_env())
    cluster = SyncedNodes(tmp_path_factory.mktemp("cluster"))
    with cluster.server:
        cluster.serve()
        try:
            yield cluster
        finally:
            for node in cluster.nodes:
                node.end()
            cluster.board.close()


@pytest.fixture
async def both(cluster: SyncedNodes) -> SyncedNodes:
    """Waits until both nodes are healthy, on whatever weights the previous test left."""
    await until(
        lambda: all(node.healthy() for node in cluster.nodes), "both nodes healthy", cluster
    )
    cluster.fenced.clear()
    return cluster


@pytest.fixture
async def rollout(cluster: SyncedNodes) -> AsyncIterator[RolloutClient]:
    async with RolloutClient("router", cluster.nodes[0].router_url, deadline_s=60) as client:
        yield client


async def served(node: Node) -> int:
    """Asks this node's engine directly for its weight version."""
    async with RolloutClient("engine", node.engine_url, deadline_s=60) as engine:
        return await generate(engine)


async def test_base_model_is_served_before_anything_is_published(
    cluster: SyncedNodes, rollout: RolloutClient
) -> None:
    await until(
        lambda: all(node.healthy() for node in cluster.nodes), "both nodes healthy", cluster
    )
    await until(lambda: len(cluster.reports()) == 2, "two reports", cluster)
    assert {report.version for report in cluster.reports()} == {None}
    assert cluster.routed() == {node.engine_url for node in cluster.nodes}
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    answer = await rollout.request("POST", "/generate", json=body)
    assert answer.json()["meta_info"]["weight_version"] == "default"


async def test_published_version_is_served_by_every_engine_through_the_router(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    both.publish("a", 1)
    both.publish("a", 12)
    await until(lambda: both.all_serve("a", 12), "weights 12 everywhere", both)
    assert {await generate(rollout) for _ in range(8)} == {12}
    assert [await served(node) for node in both.nodes] == [12, 12]
    for node in both.nodes:
        assert "rlhf_rollout_weight_version 12.0" in node.get("/metrics").text
        assert sum(process.name() == "sglang::router" for process in node.family()) == (
            node.rank == 0
        )


async def test_both_nodes_get_traffic(both: SyncedNodes, rollout: RolloutClient) -> None:
    both.publish("a", 13)
    await until(lambda: both.all_serve("a", 13), "weights 13 everywhere", both)
    before = [requests_served(node) for node in both.nodes]
    for _ in range(10):
        await generate(rollout)
    after = [requests_served(node) for node in both.nodes]
    assert [new - old for old, new in zip(before, after, strict=True)] == [5, 5]


async def test_corrupted_weights_fence_the_nodes_until_they_are_repaired(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    both.publish("a", 20, spoil=True)
    await until(
        lambda: [report.state for report in both.reports()] == ["stale"] * 2, "both stale", both
    )
    await until(lambda: both.routed() == set(), "both fenced", both)
    assert all("checksum" in report.detail for report in both.reports())
    answer = both.nodes[1].get("/health")
    assert answer.status_code == 503
    assert "checksum" in answer.json()["reason"]
    both.flip_byte(20)
    await until(lambda: both.all_serve("a", 20), "weights 20 everywhere", both)
    assert await generate(rollout) == 20


@pytest.mark.parametrize("damaged", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_killed_engine_comes_back_with_the_newest_weights(
    both: SyncedNodes, rollout: RolloutClient, damaged: bool
) -> None:
    """The engine does not start from the node's damaged copy: it starts without one, and the agent
    fetches another."""
    manifest = both.publish("a", 21 + damaged)
    await until(lambda: both.all_serve("a", 21 + damaged), "the weights everywhere", both)
    node, starts = both.nodes[1], both.nodes[1].status()["engine_starts"]
    held = (
        both.directory
        / "rollout"
        / "rollout-server-1"
        / "weights"
        / f"v{manifest.version:06d}"
        / "model.safetensors"
    )
    if damaged:
        flip_last_byte(held)
    node.engine().kill()
    await until(lambda: node.status()["engine_starts"] == starts + 1, "engine started again", both)
    assert {await generate(rollout) for _ in range(4)} == {
        manifest.version
    }  # the other node answers meanwhile
    await until(lambda: both.all_serve("a", manifest.version), "the weights everywhere again", both)
    command = node.engine().cmdline()
    assert command[command.index("--weight-version") + 1] == ("default" if damaged else "21")
    assert command[command.index("--model-path") + 1] == str(both.model if damaged else held.parent)
    assert await served(node) == manifest.version
    assert checksum(held) == {file.name: file.xxh3 for file in manifest.files}[held.name]


@pytest.mark.slow
async def test_an_engine_that_starts_slowly_finds_the_weights_it_was_started_with(
    both: SyncedNodes,
) -> None:
    both.publish("a", 21)
    await until(lambda: both.all_serve("a", 21), "weights 21 everywhere", both)
    node, starts = both.nodes[1], both.nodes[1].status()["engine_starts"]
    node.engine().kill()
    await until(lambda: node.status()["engine_starts"] == starts + 1, "engine started again", both)
    starting = node.engine()
    starting.suspend()  # long before it reads anything
    store = both.directory / "rollout" / "rollout-server-1" / "weights"
    for version in (22, 23, 24, 25):
        both.publish("a", version)
        path = store / f"v{version:06d}"
        await until(path.is_dir, f"weights {version} here", both)
    starting.resume()
    await until(lambda: both.all_serve("a", 25), "weights 25 everywhere", both)
    assert node.status()["engine_starts"] == starts + 1
    assert "v000021" in " ".join(node.engine().cmdline())
    both.publish("a", 26)
    await until(lambda: both.all_serve("a", 26), "weights 26 everywhere", both)
    assert sorted(path.name for path in store.iterdir()) == ["v000025", "v000026"]


async def test_killed_router_comes_back_with_its_workers(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    both.publish("a", 27)
    await until(lambda: both.all_serve("a", 27), "weights 27 everywhere", both)
    old = both.nodes[0].status()["router_pid"]
    psutil.Process(old).children()[0].kill()
    await until(
        lambda: both.nodes[0].status()["router_pid"] not in (None, old), "another router", both
    )
    await until(lambda: both.all_serve("a", 27), "both registered again", both)
    assert await generate(rollout) == 27


async def test_an_engine_that_is_cut_off_from_the_trainer_leaves_the_router_until_it_answers(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    """The trainer goes on without such an engine, which would answer with old weights."""
    both.publish("a", 28)
    await until(lambda: both.all_serve("a", 28), "weights 28 everywhere", both)
    both.server.close()
    await until(lambda: not both.routed(), "no engine in the router", both)
    assert [await served(node) for node in both.nodes] == [28, 28], "the engines go on"
    both.serve()
    await until(lambda: both.all_serve("a", 28), "both registered again", both)
    assert await generate(rollout) == 28


async def test_new_run_replaces_the_weights_though_its_version_is_lower(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    both.publish("a", 30)
    await until(lambda: both.all_serve("a", 30), "weights 30 everywhere", both)
    both.publish("b", 0)
    await until(lambda: both.all_serve("b", 0), "weights 0 of the new run", both)
    assert {await generate(rollout) for _ in range(4)} == {0}


async def test_an_engine_that_a_late_copy_of_a_load_set_back_loads_the_newest_again(
    both: SyncedNodes,
) -> None:
    both.publish("b", 40)
    await until(lambda: both.all_serve("b", 40), "weights 40 everywhere", both)
    first, _ = both.nodes
    async with RolloutClient("engine", first.engine_url, deadline_s=60) as engine:
        earlier = {"model_path": str(both.model), "weight_version": "39"}
        await engine.request("POST", "/update_weights_from_disk", json=earlier)

    def label() -> object:
        return httpx.get(f"{first.engine_url}/model_info").json()["weight_version"]

    await until(lambda: label() == "40", "weights 40 again", both)
    await until(lambda: both.all_serve("b", 40), "the node says so", both)
    assert await served(first) == 40


async def test_weights_the_engine_refuses_fence_the_node_until_good_ones_come(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    good = both.tensors
    both.tensors = {name: tensor[:1] for name, tensor in good.items()}
    both.publish("b", 1)
    both.tensors = good
    await until(
        lambda: [report.state for report in both.reports()] == ["stale"] * 2, "both stale", both
    )
    assert all("load of weights 1 failed" in report.detail for report in both.reports())
    await until(lambda: both.routed() == set(), "both fenced", both)
    both.publish("b", 2)
    await until(lambda: both.all_serve("b", 2), "weights 2 everywhere", both)
    assert await generate(rollout) == 2


async def test_no_engine_starts_with_weights_that_an_engine_refused(
    both: SyncedNodes, rollout: RolloutClient
) -> None:
    """A start compares the files with nothing: transformers leaves out a tensor that the model does
    not have."""
    before = [node.status()["engine_starts"] for node in both.nodes]
    good = both.tensors
    bias = torch.ones(len(good["model.layers.0.mlp.up_proj.weight"]))
    both.tensors = good | {"model.layers.0.mlp.up_proj.bias": bias}
    both.publish("b", 3)
    both.tensors = good

    def are_refused() -> bool:
        """Both have restarted, and neither has the weights. They try and restart again and again."""
        starts = [node.status()["engine_starts"] for node in both.nodes]
        return all(map(operator.gt, starts, before)) and all(
            report.state == "stale"
            and report.version is None
            and "do not belong to this model" in report.detail
            for report in both.reports()
        )

    await until(are_refused, "both restarted without the weights", both)
    both.publish("b", 4)
    await until(lambda: both.all_serve("b", 4), "weights 4 everywhere", both)
    assert await generate(rollout) == 4


@pytest.mark.parametrize("way", ["http", "shared", "distributed"])
def test_every_way_delivers_the_same_tensors(both: SyncedNodes, way: str) -> None:
    publisher = both.publisher(way, way)
    for version in (1, 2):
        new = both.weights()
        publisher.publish(new.items(), version)
        assert both.serving(way, version)
        assert both.held() == [sums(new)] * 2
    info = httpx.get(f"{both.nodes[0].engine_url}/model_info", timeout=10, trust_env=False).json()
    if way != "distributed":  # a broadcast leaves the path as it was
        assert (str(both.board.directory) in info["model_path"]) is (way == "shared")
    assert both.fenced == []


def test_a_shared_directory_that_is_not_visible_is_downloaded_loudly(both: SyncedNodes) -> None:
    publisher, new = both.publisher("elsewhere", "shared"), both.weights()
    announce = both.board.announce
    with pytest.MonkeyPatch.context() as patch:  # the nodes do not mount the trainer's disk
        patch.setattr(
            both.board,
            "announce",
            lambda manifest: announce(
                manifest.model_copy(update={"directory": "/not/mounted/here"})
            ),
        )
        publisher.publish(new.items(), 1)
    assert both.held() == [sums(new)] * 2
    assert (
        "/not/mounted/here cannot be read here, weights 1 are downloaded instead" in both.output()
    )


def test_a_broadcast_writes_no_files_and_keeps_its_group(both: SyncedNodes) -> None:
    publisher = both.publisher("quiet", "distributed")
    before, groups = both.files(), set()
    for version in (1, 2, 3):
        publisher.publish(both.weights().items(), version)
        latest = both.announced()
        groups.add(latest.group)
        assert sorted(latest.ranks.values()) == [1, 2]
        assert len(latest.buckets) > 3
    assert len(groups) == 1
    assert both.files() == before
    assert both.serving("quiet", 3)


async def test_ending_leaves_no_process_behind(both: SyncedNodes) -> None:
    """This test is last because it ends the nodes, one with SIGKILL and one with SIGTERM."""
    killed, ended = both.nodes[1], both.nodes[0]
    families = [*killed.family(), *ended.family()]
    assert len(families) == 6
    killed.process.kill()
    killed.process.wait(400)
    ended.process.send_signal(signal.SIGTERM)
    assert ended.process.wait(400) == 0
    _, alive = psutil.wait_procs(families, timeout=400)
    assert alive == []
    assert "Traceback" not in ended.output.read_text()
