"""Nodes that die, hang or come late while the trainer's own publisher brings weights into real
engines."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from torch import Tensor

from common.process.topology import Topology
from common.wire.schemas import WorkerReport
from tests.support.engines.synced_nodes import SyncedNodes, sums

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def reports(cluster: SyncedNodes) -> dict[str, WorkerReport]:
    return {report.name: report for report in cluster.reports()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncedNodes]:
    os.environ.update(Topology().loopback_env())
    cluster = SyncedNodes(tmp_path_factory.mktemp("sync"))
    with cluster.server:
        cluster.serve()
        try:
            cluster.until(cluster.healthy, "both nodes healthy")
            yield cluster
        finally:
            for node in cluster.nodes:
                node.end()
            cluster.board.close()


@pytest.fixture
def both(cluster: SyncedNodes) -> SyncedNodes:
    """Waits until both nodes are healthy, on whatever weights the previous test left."""
    cluster.until(cluster.healthy, "both nodes healthy")
    cluster.fenced.clear()
    return cluster


def test_an_engine_that_dies_midway_takes_files_and_is_back_in_the_next_group(
    both: SyncedNodes, caplog: pytest.LogCaptureFixture
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


def test_an_engine_that_dies_after_a_broadcast_takes_its_files_and_does_not_wait_for_another(
    both: SyncedNodes,
) -> None:
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
    assert (
        "broadcast of weights 1 failed" not in node.output.read_text()[said:]
    )  # it is over: nobody would send


def test_an_engine_that_hangs_is_started_again_and_takes_files(
    both: SyncedNodes, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = both.publisher("hung", "distributed")
    publisher.publish(both.weights().items(), 1)
    assert publisher.broadcaster is not None
    publisher.broadcaster._limit_s = 15.0  # this test waits it out
    hung, starts, new = (
        both.nodes[1].engine(),
        both.nodes[1].status()["engine_starts"],
        both.weights(),
    )
    hung.send_signal(signal.SIGSTOP)
    try:
        publisher.publish(new.items(), 2)
        assert set(both.fenced) <= {
            "rollout-server-1"
        }  # empty if it is back before the publisher gives up on it
        assert "the engine is stuck in the broadcast of weights 2" in caplog.text
        both.until(lambda: both.serving("hung", 2), "weights 2 everywhere")
    finally:
        with contextlib.suppress(ProcessLookupError, Exception):
            hung.send_signal(signal.SIGCONT)
    assert both.nodes[1].status()["engine_starts"] == starts + 1
    assert both.held() == [sums(new)] * 2


def test_a_node_that_comes_late_takes_files_and_is_in_the_next_group(
    both: SyncedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.weights.board._SILENT_S", 8.0)
    monkeypatch.setattr("trainer.weights.board._PERMISSION_S", 8.0)
    publisher = both.publisher("late", "distributed")
    publisher.publish(both.weights().items(), 1)
    both.nodes[1].end()
    publisher.publish(both.weights().items(), 2)  # by HTTP to the remaining node
    both.until(
        lambda: list(reports(both)) == ["rollout-server-0"],
        "the other one is counted as gone",
    )
    new = both.weights()
    publisher.publish(new.items(), 3)
    latest = both.announced()
    assert sorted(latest.ranks) == ["rollout-server-0"]
    both.nodes[1] = both.start(1)
    both.until(lambda: both.serving("late", 3), "weights 3 everywhere")
    assert both.held() == [sums(new)] * 2
    assert "v000003" in both.files()
    both.until(both.healthy, "both nodes healthy")
    done = threading.Thread(
        target=publisher.publish, args=(new.items(), 4)
    )  # any single thread may publish
    done.start()
    done.join(400)
    latest = both.announced()
    assert not done.is_alive()
    assert sorted(latest.ranks) == ["rollout-server-0", "rollout-server-1"]
    both.until(lambda: both.serving("late", 4), "weights 4 everywhere")
