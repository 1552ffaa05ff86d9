"""Which rollout nodes the trainer waits for, and which it fences, by what they report."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from common.wire.schemas import WeightManifest, WorkerReport, WorkerState
from tests.support.errors import raises
from trainer.weights import board
from trainer.weights.board import PublishFailed, WeightBoard

LIMIT_S = 0.8
MANIFEST = WeightManifest(version=3, run_id="run")


class Nodes:
    """Two nodes that report to a board; `progress` says what each reports next."""

    def __init__(self, directory: Path) -> None:
        self.board = WeightBoard(directory)
        self.versions = [2, 2]
        self.progress: list[Callable[[], int]] = [lambda: 5, lambda: 5]
        self.silent: set[int] = set()
        self.ended = threading.Event()

    def report(self) -> None:
        for node in {0, 1} - self.silent:
            state: WorkerState = "ready" if self.versions[node] == 3 else "updating"
            self.board.report(
                WorkerReport(
                    name=f"rollout-server-{node}",
                    url=f"http://node-{node}",
                    num_nodes=2,
                    state=state,
                    version=self.versions[node],
                    run_id="run",
                    detail="" if state == "ready" else "1.2 of 3.4 MB fetched",
                    progress=self.progress[node](),
                )
            )

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.report()


class Growing:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


def fall_silent(nodes: Nodes, seconds: Callable[[], float], patch: pytest.MonkeyPatch) -> None:
    """Ends the reports of node 1; its last one is then so old, and that of node 0 always new."""

    def silence_s(worker: board._Worker) -> float:
        return seconds() if worker.report.name == "rollout-server-1" else 0.0

    patch.setattr(board._Worker, "silence_s", property(silence_s))
    nodes.silent = {1}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(board, "_PERMISSION_S", 0.1)
    nodes = Nodes(tmp_path)
    nodes.report()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(nodes.run)
        try:
            yield nodes
        finally:
            nodes.ended.set()


def waiting(nodes: Nodes) -> "Future[list[WorkerReport]]":
    found: Future[list[WorkerReport]] = Future()

    def work() -> None:
        try:
            found.set_result(nodes.board.wait_confirmed(MANIFEST, LIMIT_S, lambda _: None))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return found


def test_nodes_that_make_progress_are_waited_for(nodes: Nodes) -> None:
    nodes.progress = [Growing(), Growing()]
    found = waiting(nodes)
    time.sleep(5 * LIMIT_S)
    assert not found.done()
    nodes.versions = [3, 3]
    assert found.result(60) == []


def test_a_node_without_progress_is_fenced_while_another_serves(nodes: Nodes) -> None:
    nodes.versions[0] = 3
    (fenced,) = waiting(nodes).result(60)
    assert fenced.name == "rollout-server-1"


def test_the_answer_to_a_report_says_whether_the_engine_may_serve(nodes: Nodes) -> None:
    def may_serve(version: int, node: int = 1) -> bool:
        return nodes.board.report(
            WorkerReport(
                name=f"rollout-server-{node}",
                url=f"http://node-{node}",
                num_nodes=2,
                state="ready",
                version=version,
                run_id="run",
            )
        )

    nodes.ended.set()
    nodes.board.announce(MANIFEST)
    assert may_serve(2), "the trainer waits for it"
    assert may_serve(3, node=0)
    assert may_serve(3)
    assert nodes.board.wait_confirmed(MANIFEST, LIMIT_S, lambda _: None) == []
    assert may_serve(3)
    assert not may_serve(2), "the trainer goes on with 3"
    nodes.board.announce(MANIFEST.model_copy(update={"version": 4}))
    assert may_serve(3)
    assert not may_serve(2), "it was not even there for the version before"


def test_a_fenced_node_stays_out_until_it_has_caught_up(nodes: Nodes) -> None:
    nodes.board.announce(MANIFEST)
    nodes.versions[0] = 3
    (fenced,) = waiting(nodes).result(60)
    nodes.ended.set()
    assert not nodes.board.report(fenced)
    following = MANIFEST.model_copy(update={"version": 4})
    nodes.board.announce(following)
    assert not nodes.board.report(fenced)
    assert nodes.board.report(fenced.model_copy(update={"version": 4}))


def test_a_slow_node_is_no_stuck_node(nodes: Nodes) -> None:
    nodes.versions[0] = 3
    nodes.progress[1] = Growing()
    found = waiting(nodes)
    time.sleep(3 * LIMIT_S)
    assert not found.done()
    nodes.progress[1] = lambda: 7
    (fenced,) = found.result(60)
    assert fenced.name == "rollout-server-1"


def test_without_any_node_that_serves_the_error_says_how_far_each_is(nodes: Nodes) -> None:
    expected = {"code": "nodes_behind", "field": "limits.fence_after_s", "value": "0.8"}
    with raises(PublishFailed, **expected) as caught:
        waiting(nodes).result(60)
    assert "rollout-server-0 (updating, weights 2) 1.2 of 3.4 MB fetched" in caught.value.message


def test_a_node_whose_agent_is_silent_is_not_called_ready(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last report says that it serves the weights before; it has said nothing since."""
    nodes.versions[0] = 3

    # It is quiet, until the trainer waits for nothing but its silence.
    def is_told() -> bool:
        told = [getattr(record, "event", {}) for record in caplog.records]
        return any(each.get("code") == "nodes_behind" for each in told)

    fall_silent(nodes, lambda: 40.0 if is_told() else 20.0, monkeypatch)
    (fenced,) = waiting(nodes).result(60)
    assert fenced.name == "rollout-server-1"
    assert re.search(r"rollout-server-1 \(no report for \d+ s, its agent may hang", caplog.text)


def test_that_a_node_gets_no_requests_for_its_silence_is_said_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.versions[0] = 3
    fall_silent(nodes, lambda: 40.0, monkeypatch)
    (fenced,) = waiting(nodes).result(60)
    assert fenced.name == "rollout-server-1"
    assert waiting(nodes).result(60) == []
    said = [line for line in caplog.messages if "gets no requests" in line]
    assert len(said) == 1
    assert said[0].startswith("rollout-server-1: no report for ")


def test_an_agent_that_was_restarted_counts_from_0_again(nodes: Nodes) -> None:
    """Its progress is below what it had reported before, and is progress all the same."""
    nodes.versions[0] = 3
    nodes.progress[1] = lambda: 1000
    found = waiting(nodes)
    growing = Growing()
    nodes.progress[1] = growing
    time.sleep(3 * LIMIT_S)
    assert growing.number < 1000
    assert not found.done()
    nodes.versions[1] = 3
    assert found.result(60) == []
