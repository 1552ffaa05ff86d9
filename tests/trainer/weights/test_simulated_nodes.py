"""Whom the trainer waits for, on a clock of the test: random nodes that load, restart, fall silent
and go to sleep."""

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.process import progress, watchdog
from common.wire.schemas import WeightManifest, WorkerReport, WorkerState
from trainer.weights import board
from trainer.weights.board import PublishFailed, WeightBoard

LIMIT_S = 5.0
FORGIVEN_S = 0.5
"""A look comes every 0.2 s."""
SILENT_S = 30.0
PERMISSION_S = 30.0
MANIFEST = WeightManifest(version=3, run_id="run")


@dataclass
class Node:
    """A node that reports at every look; times are seconds since the wait began."""

    number: int
    arrives: float = math.inf
    """When it serves the version."""
    moves: list[float] = field(default_factory=list)
    """When its progress grows."""
    restarts: float = math.inf
    """When its agent begins to count from 0."""
    silent: float = math.inf
    sleeps: float = math.inf

    @property
    def name(self) -> str:
        return f"rollout-server-{self.number}"

    def report(self, at: float, nodes: int) -> WorkerReport:
        state: WorkerState = "ready" if at >= self.arrives else "updating"
        if at >= self.sleeps:
            state = "asleep"
        begin = self.restarts if at >= self.restarts else -1.0
        return WorkerReport(
            name=self.name,
            url="",
            num_nodes=nodes,
            state=state,
            version=3 if at >= self.arrives else 2,
            run_id="run",
            progress=sum(begin < each <= at for each in self.moves),
        )

    def moved_within(self, begin: float, end: float) -> bool:
        return any(begin < each < end for each in [0.0, *self.moves, self.arrives])


class Simulation(threading.Condition):
    """The lock of a board, whose `wait` lets time pass and the nodes report."""

    def __init__(self, nodes: list[Node], directory: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.nodes = nodes
        self.now = 0.0
        self.pauses: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: 1000.0 + self.now)
        patch.setattr(board, "time", clock)
        patch.setattr(progress, "time", clock)
        self.board = WeightBoard(directory)
        self.board._lock = self
        self.board.announce(MANIFEST)
        self.board.source = None

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        self.pauses.append(timeout or 0.0)
        assert self.now < 1000.0, "it never ends"
        self.report()
        return True

    def report(self) -> None:
        for node in self.nodes:
            if self.now < node.silent:
                self.board.report(node.report(self.now, len(self.nodes)))

    def serving(self) -> set[str]:
        return {
            node.name
            for node in self.nodes
            if node.arrives <= self.now and self.now < node.silent + SILENT_S
            if node.silent > node.arrives
        }


def random_node(draw: random.Random, number: int) -> Node:
    node = Node(number)
    at = 0.0
    for _ in range(draw.randint(0, 6)):
        at += draw.choice([0.4, 1.0, 2.0, 4.0, 8.0] if number else [0.4, 1.0])
        node.moves.append(at)
    if draw.random() < 0.75:
        node.arrives = at + draw.choice([0.2, 1.0, 3.0])
    if draw.random() < 0.4 and node.moves:
        node.restarts = draw.choice(node.moves) + 0.1
    return node


@pytest.mark.parametrize("seed", range(40))
def test_who_moves_is_waited_for_and_who_does_not_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(board, "_PERMISSION_S", 0.0)  # it has a test of its own
    draw = random.Random(seed)
    nodes = [random_node(draw, number) for number in range(draw.randint(1, 3))]
    simulation = Simulation(nodes, tmp_path, monkeypatch)
    simulation.report()
    said: list[str] = []
    try:
        fenced = simulation.board.wait_confirmed(MANIFEST, LIMIT_S, said.append)
    except PublishFailed:
        assert not simulation.serving()
        fenced = [node.report(simulation.now, len(nodes)) for node in nodes]
    else:
        names = {worker.name for worker in fenced}
        assert len(names) == len(fenced)
        assert simulation.serving() == {node.name for node in nodes} - names
        assert simulation.board._confirmed == MANIFEST

    end = simulation.now
    left = {worker.name for worker in fenced}
    for node in nodes:
        if node.name in left:
            assert not node.moved_within(end - LIMIT_S + FORGIVEN_S, end - FORGIVEN_S)
        else:
            assert node.arrives <= end
    last = max(each for node in nodes for each in (0.0, *node.moves, node.arrives) if each <= end)
    assert end <= last + LIMIT_S + 2 * FORGIVEN_S
    if not left:
        assert end <= max(node.arrives for node in nodes) + FORGIVEN_S
    assert bool(said) == (end > 10.2) or end > 10.0

    for node in nodes:  # a node that was left behind gets requests again once it has caught up
        report = node.report(end, len(nodes)).model_copy(update={"state": "ready", "version": 2})
        assert simulation.board.report(report) == (not simulation.board._confirmed)
        assert simulation.board.report(report.model_copy(update={"version": 3}))


@pytest.mark.parametrize(
    ("version", "arrives", "end_s"),
    [(2, math.inf, LIMIT_S + PERMISSION_S), (2, 12.0, 12.0), (1, math.inf, LIMIT_S)],
)
def test_nobody_goes_on_while_an_agent_may_list_older_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, arrives: float, end_s: float
) -> None:
    """It is told that it may not, but the answer to a report may be lost. An engine that did not
    even have the version before has no permission.
    """
    simulation = Simulation([Node(0, arrives=0.0), Node(1, arrives=arrives)], tmp_path, monkeypatch)
    report = simulation.board.report
    simulation.board._confirmed = MANIFEST.model_copy(update={"version": 2})
    answers: list[bool] = []

    def reported(sent: WorkerReport) -> bool:
        if sent.version != MANIFEST.version:
            sent = sent.model_copy(update={"version": version})
        may_serve = report(sent)
        if sent.name == "rollout-server-1":
            answers.append(may_serve)
        return may_serve

    monkeypatch.setattr(simulation.board, "report", reported)
    simulation.report()
    left = simulation.board.wait_confirmed(MANIFEST, LIMIT_S, print)
    assert simulation.now == pytest.approx(end_s, abs=2 * FORGIVEN_S)
    assert answers[0] == (version == 2)
    # It keeps its requests if it serves the weights before its permission has ended.
    is_left = math.isinf(arrives)
    assert [worker.name for worker in left] == ["rollout-server-1"] * is_left
    assert answers[-1] != is_left


@pytest.mark.parametrize("silent", [-40.0, -20.0, 0.0])
def test_a_silent_node_is_left_behind_once_its_engine_gets_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: float
) -> None:
    """Its agent may list the engine again until it has been silent for long."""
    nodes = [Node(0, arrives=1.0), Node(1, silent=silent)]
    simulation = Simulation(nodes, tmp_path, monkeypatch)
    simulation.now = silent - 0.1
    simulation.board.report(nodes[1].report(simulation.now, 2))
    simulation.now = 0.0
    simulation.report()
    (left,) = simulation.board.wait_confirmed(MANIFEST, LIMIT_S, lambda _: None)
    assert left.name == "rollout-server-1"
    assert max(1.0, silent + SILENT_S - 0.1) <= simulation.now
    assert simulation.now <= max(LIMIT_S, silent + SILENT_S) + 2 * FORGIVEN_S
    assert [worker.name for worker in simulation.board.workers()] == ["rollout-server-0"]
    assert simulation.board.num_nodes() == 2
    assert simulation.board.count("ready") == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_update_begins_once_every_engine_has_said_that_it_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What was said before the question may be of the last time."""
    draw = random.Random(seed)
    delays = [0.0, 0.5, 2.0, 4.0, 12.0]
    nodes = [Node(number, sleeps=draw.choice(delays)) for number in range(draw.randint(1, 3))]
    simulation = Simulation(nodes, tmp_path, monkeypatch)
    for node in nodes:
        early = node.report(0.0, len(nodes)).model_copy(update={"state": "asleep"})
        simulation.board.report(early)
    simulation.now = 0.01
    begin = simulation.now
    ordered = sorted(node.sleeps for node in nodes)
    gaps = [later - before for before, later in zip([0.0, *ordered], ordered, strict=False)]
    if max(gaps) > LIMIT_S:
        with pytest.raises(PublishFailed) as failed:
            simulation.board.sleep(LIMIT_S)
        assert failed.value.field == "limits.fence_after_s"
        assert simulation.now >= LIMIT_S
        for node in nodes:
            assert (node.name in failed.value.message) == (node.sleeps > simulation.now)
    else:
        simulation.board.sleep(LIMIT_S)
        assert max(begin + 0.1, ordered[-1]) <= simulation.now <= ordered[-1] + FORGIVEN_S
    latest = simulation.board.latest()
    assert latest is not None
    assert (latest.asleep, latest.version) == (True, 3)


@pytest.mark.parametrize("wait", ["sleep", "wait_confirmed"])
def test_a_dead_server_ends_every_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    simulation = Simulation([Node(0, moves=[float(n) for n in range(99)])], tmp_path, monkeypatch)
    calls: dict[str, Callable[[], object]] = {
        "sleep": lambda: simulation.board.sleep(LIMIT_S),
        "wait_confirmed": lambda: simulation.board.wait_confirmed(MANIFEST, LIMIT_S, print),
    }
    simulation.board.server_died()
    with pytest.raises(PublishFailed) as failed:
        calls[wait]()
    assert failed.value.field == "trainer.port"


def test_engines_of_several_nodes_report_once_and_the_first_wait_is_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [Node(0, arrives=0.0), Node(1, arrives=0.0)]
    simulation = Simulation(nodes, tmp_path, monkeypatch)
    of_four = {"num_nodes": 4, "nodes_per_engine": 2}

    def report(*numbers: int) -> None:
        for number in numbers:
            made = nodes[number].report(0.0, 2)
            simulation.board.report(made.model_copy(update=of_four))

    simulation.nodes = []
    report(0)
    later = iter([0, 0, 1])

    def wait(timeout: float | None = None) -> bool:
        simulation.now += timeout or 0.0
        report(0)
        if next(later) == 1:
            report(1)
        return True

    monkeypatch.setattr(simulation, "wait", wait)
    assert simulation.board.wait_confirmed(MANIFEST, LIMIT_S, print) == []
    assert next(later, None) is None
    assert simulation.board.num_nodes() == 4


@pytest.mark.parametrize("limit_s", [0.8, 5.0])
def test_a_wait_is_told_less_and_less_often_and_looks_as_often_as_its_limit_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    moves = [0.1 * step for step in range(4000)]
    simulation = Simulation([Node(0, arrives=400.0, moves=moves)], tmp_path, monkeypatch)
    simulation.report()
    said: list[float] = []

    def say(text: str) -> None:
        said.append(simulation.now)
        assert f"waited {simulation.now:.0f} s so far: 0 of 1 rollout nodes" in text

    assert simulation.board.wait_confirmed(MANIFEST, limit_s, say) == []
    gaps = [after - before for before, after in zip([0.0, *said], said, strict=False)]
    assert gaps == pytest.approx([10, 20, 40, 60, 60, 60, 60, 60], abs=0.5)
    assert max(simulation.pauses) == pytest.approx({0.8: 0.1, 5.0: 0.2}[limit_s])


@pytest.mark.parametrize("serves", [True, False])
def test_a_deadline_that_has_passed_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    simulation = Simulation([Node(0), Node(1, arrives=0.0)][: 1 + serves], tmp_path, monkeypatch)
    simulation.report()
    passed: list[str] = []
    monkeypatch.setattr(watchdog, "deadline_passed", passed.append)
    if serves:
        (left,) = simulation.board.wait_confirmed(MANIFEST, LIMIT_S, print)
        assert left.name == "rollout-server-0"
    else:
        with pytest.raises(PublishFailed) as failed:
            simulation.board.wait_confirmed(MANIFEST, LIMIT_S, print)
        assert (failed.value.code, failed.value.value) == ("nodes_behind", "5.0")
        assert failed.value.field == "limits.fence_after_s"
        assert "rollout-server-0" in failed.value.message
    (text,) = passed
    assert "rollout-server-0 (updating, weights 2)" in text
    assert ("1 of 2" in text) == serves


def test_a_worker_that_is_silent_is_first_in_doubt_then_gone_and_later_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation([], tmp_path, monkeypatch)
    weights = simulation.board
    report = Node(0, arrives=0.0).report(0.0, 3).model_copy(update={"detail": "well"})
    weights.report(report)
    (worker,) = weights._workers.values()

    simulation.now = 8.0
    assert str(worker) == "rollout-server-0 (ready, weights 3) well"
    simulation.now = 8.6
    assert str(worker).startswith("rollout-server-0 (no report for 9 s")
    simulation.now = 29.9
    assert (weights.workers(), weights.count("ready")) == ([report], 1)
    simulation.now = 30.0
    assert (weights.workers(), weights.count("ready")) == ([], 0)
    for now, nodes in ((599.9, 3), (600.0, 1)):
        simulation.now = now
        weights.report(Node(1).report(now, 1))
        assert weights.num_nodes() == nodes


def test_a_node_that_fails_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Simulation([], tmp_path, monkeypatch).board
    states: list[WorkerState] = [
        "failed",
        "failed",
        "ready",
        "stale",
        "stale",
        "failed",
        "updating",
    ]
    logged = []
    for state in states:
        caplog.clear()
        weights.report(Node(0).report(0.0, 1).model_copy(update={"state": state}))
        logged.append(len(caplog.records))
    assert logged == [1, 0, 0, 1, 0, 1, 0]
