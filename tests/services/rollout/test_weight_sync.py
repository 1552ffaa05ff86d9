"""The three ways to bring new weights into engines, with real agents and engines and the trainer's own publisher."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.observe import Metrics
from common.schemas import Broadcast, WorkerReport
from common.topology import TRAINER, Topology
from learning.weight_group import digest
from tests.support.engines import write_model
from tests.support.rollout_nodes import GROUP, TRAINER_PORT, Node, names
from trainer.server import BackgroundServer, create_trainer_app
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher, WeightBoard
from trainer.weights.transfer import Rendezvous

pytestmark = pytest.mark.integration

PATIENCE_S = 15.0
ADDRESS = names(2)[f"{TRAINER}-0.{GROUP}"].address


class Cluster:
    """Two rollout nodes and the publishing side of a trainer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "model", seed=0)
        self.static_files = [file for file in self.model.iterdir() if file.name != "model.safetensors"]
        self.board = WeightBoard(directory / "published")
        self.fenced: list[str] = []
        self.nodes = [self.start(rank) for rank in (0, 1)]

    def start(self, rank: int) -> Node:
        return Node(rank, 2, self.directory, self.model, RLHF_TRAINER__PUBLISH_TIMEOUT_S=str(PATIENCE_S))

    def publisher(self, run_id: str, way: str) -> Publisher:
        """Returns the trainer's publisher, with buckets of a few tensors each."""

        def fence(worker: WorkerReport) -> None:
            self.fenced.append(worker.name)

        broadcaster, common = None, (self.board, self.static_files, run_id, PATIENCE_S)
        if way == "distributed":
            broadcaster = Broadcaster(*common, Rendezvous(ADDRESS), bucket_bytes=20_000)
        return Publisher(*common, fence, print, shared=way == "shared", broadcaster=broadcaster)

    def weights(self) -> dict[str, Tensor]:
        """Returns random weights."""
        return {name: torch.randn_like(tensor) / 10 for name, tensor in load_file(self.model / "model.safetensors").items()}

    def held(self) -> list[dict[str, str]]:
        """Returns the checksums of each engine's weights, by tensor."""
        answers = [
            httpx.post(f"{node.engine_url}/weights_checker", json={}, timeout=30, trust_env=False) for node in self.nodes
        ]
        return [answer.json()["ranks"][0]["checksums"] for answer in answers]

    def reports(self) -> dict[str, WorkerReport]:
        return {report.name: report for report in self.board.workers()}

    def serving(self, run_id: str, version: int) -> bool:
        return [(w.state, w.run_id, w.version) for w in self.board.workers()] == [("ready", run_id, version)] * 2

    def announced(self) -> Broadcast:
        """Returns the announced broadcast of the newest version."""
        latest = self.board.latest()
        assert latest is not None
        assert latest.broadcast is not None
        return latest.broadcast

    def files(self) -> list[str]:
        """Returns the names of the versions that the trainer has written."""
        return sorted(path.name for path in self.board.directory.glob("v*"))

    def output(self) -> str:
        return "".join(node.output.read_text() for node in self.nodes)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + 400
        while not condition():
            assert time.monotonic() < limit, f"never: {what}; reports: {self.reports()}\n{self.output()[-6000:]}"
            time.sleep(0.1)

    def healthy(self) -> bool:
        return all(node.healthy() for node in self.nodes)


def sums(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    os.environ.update(Topology().loopback_env())
    cluster = Cluster(tmp_path_factory.mktemp("sync"))
    with BackgroundServer(create_trainer_app(cluster.board, Metrics("trainer")), ADDRESS, TRAINER_PORT):
        try:
            cluster.until(cluster.healthy, "both nodes healthy")
            yield cluster
        finally:
            for node in cluster.nodes:
                node.end()
            cluster.board.close()


@pytest.fixture
def both(cluster: Cluster) -> Cluster:
    """Waits until both nodes are healthy, on whatever weights the previous test left."""
    cluster.until(cluster.healthy, "both nodes healthy")
    cluster.fenced.clear()
    return cluster


@pytest.mark.parametrize("way", ["http", "shared", "distributed"])
def test_every_way_delivers_the_same_tensors(both: Cluster, way: str) -> None:
    publisher = both.publisher(way, way)
    for version in (1, 2):
        new = both.weights()
        publisher.publish(new.items(), version)
        assert both.serving(way, version)
        assert both.held() == [sums(new)] * 2
    info = httpx.get(f"{both.nodes[0].engine_url}/model_info", timeout=10, trust_env=False).json()
    if way != "distributed":  # a broadcast leaves the path as it was
        assert (str(both.board.directory) in info["model_path"]) is (way == "shared")
    assert all(bool(report.checksum) is (way == "distributed") for report in both.reports().values())
    assert both.fenced == []


def test_a_shared_directory_that_is_not_visible_is_downloaded_loudly(both: Cluster) -> None:
    publisher, new = both.publisher("elsewhere", "shared"), both.weights()
    announce = both.board.announce
    with pytest.MonkeyPatch.context() as patch:  # the nodes do not mount the trainer's disk
        patch.setattr(
            both.board, "announce", lambda manifest: announce(manifest.model_copy(update={"directory": "/not/mounted/here"}))
        )
        publisher.publish(new.items(), 1)
    assert both.held() == [sums(new)] * 2
    assert "/not/mounted/here cannot be read here, weights 1 are downloaded instead" in both.output()


def test_a_broadcast_writes_no_files_and_keeps_its_group(both: Cluster) -> None:
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


@pytest.mark.slow
def test_an_engine_that_dies_midway_takes_files_and_is_back_in_the_next_group(
    both: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = both.publisher("killed", "distributed")
    publisher.publish(both.weights().items(), 1)
    first = both.announced()
    new = both.weights()

    def killing() -> Iterator[tuple[str, Tensor]]:
        for index, item in enumerate(new.items()):
            if index == len(new) // 2:
                both.nodes[1].engine().kill()
            yield item

    publisher.publish(killing(), 2)
    both.until(lambda: both.serving("killed", 2), "weights 2 everywhere")
    assert both.held() == [sums(new)] * 2
    assert "weights 2 were not broadcast, so they go over HTTP: " in caplog.text
    assert "rollout-server-1 is failed" in caplog.text
    assert "v000002" in both.files()
    both.until(both.healthy, "both nodes healthy")
    new = both.weights()
    publisher.publish(new.items(), 3)
    assert both.held() == [sums(new)] * 2
    latest = both.announced()
    assert latest.group != first.group
    assert sorted(latest.ranks) == ["rollout-server-0", "rollout-server-1"]


@pytest.mark.slow
def test_an_engine_that_dies_after_a_broadcast_takes_its_files_and_does_not_wait_for_another(both: Cluster) -> None:
    publisher = both.publisher("after", "distributed")
    new = both.weights()
    publisher.publish(new.items(), 1)
    both.until(lambda: both.serving("after", 1), "weights 1 everywhere")
    node = both.nodes[1]
    said, starts = len(node.output.read_text()), node.status()["engine_starts"]
    node.engine().kill()
    both.until(lambda: node.status()["engine_starts"] == starts + 1, "another engine was started")
    both.until(lambda: both.serving("after", 1) and both.healthy(), "weights 1 everywhere again")
    assert both.held() == [sums(new)] * 2
    assert "broadcast of weights 1 failed" not in node.output.read_text()[said:]  # it is over: nobody would send


@pytest.mark.slow
def test_an_engine_that_hangs_is_started_again_and_takes_files(both: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    publisher = both.publisher("hung", "distributed")
    publisher.publish(both.weights().items(), 1)
    hung, starts, new = both.nodes[1].engine(), both.nodes[1].status()["engine_starts"], both.weights()
    hung.send_signal(signal.SIGSTOP)
    try:
        publisher.publish(new.items(), 2)
        assert set(both.fenced) <= {"rollout-server-1"}  # empty if it is back before the publisher gives up on it
        assert "the engine is stuck in the broadcast of weights 2" in caplog.text
        both.until(lambda: both.serving("hung", 2), "weights 2 everywhere")
    finally:
        with contextlib.suppress(ProcessLookupError, Exception):
            hung.send_signal(signal.SIGCONT)
    assert both.nodes[1].status()["engine_starts"] == starts + 1
    assert both.held() == [sums(new)] * 2


@pytest.mark.slow
def test_a_node_that_comes_late_takes_files_and_is_in_the_next_group(both: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.weights.publisher._SILENT_S", 8.0)
    publisher = both.publisher("late", "distributed")
    publisher.publish(both.weights().items(), 1)
    both.nodes[1].end()
    publisher.publish(both.weights().items(), 2)  # by HTTP to the remaining node
    both.until(lambda: list(both.reports()) == ["rollout-server-0"], "the other one is counted as gone")
    new = both.weights()
    publisher.publish(new.items(), 3)
    latest = both.announced()
    assert sorted(latest.ranks) == ["rollout-server-0"]
    both.nodes[1] = both.start(1)
    both.until(lambda: both.serving("late", 3), "weights 3 everywhere")
    assert both.held() == [sums(new)] * 2
    assert "v000003" in both.files()
    both.until(both.healthy, "both nodes healthy")
    done = threading.Thread(target=publisher.publish, args=(new.items(), 4))  # any single thread may publish
    done.start()
    done.join(400)
    latest = both.announced()
    assert not done.is_alive()
    assert sorted(latest.ranks) == ["rollout-server-0", "rollout-server-1"]
    both.until(lambda: both.serving("late", 4), "weights 4 everywhere")
