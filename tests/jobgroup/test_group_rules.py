"""When the tasks of a group start, restart and end, and what the group's status is: random groups on
a virtual clock, against SkyPilot's rules, written anew over what happened.
"""

import asyncio
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.process import launcher
from common.process.topology import LOST, WRONG_SETTING
from jobgroup.local import runner as runner_module
from jobgroup.local.output import Screen
from jobgroup.local.runner import Runner, TaskRun
from jobgroup.spec import Task
from tests.simulation.virtual_time import VirtualLoop, simulated

KILLED = 128 + signal.SIGTERM
CAUSE_S = 10.0
STATUSES = (0, 0, 0, 0, 0, 1, 2, 7, LOST, WRONG_SETTING, 137)


@dataclass(eq=False)
class Node:
    """Stands for a node: it ends by itself at a time that is drawn, if ever, and some time after it
    was told to.
    """

    name: str
    script: str
    env: dict[str, str]
    workdir: Path
    log: Path
    screen: Screen
    grace_s: float
    last_lines: list[bytes] = field(default_factory=list)
    began: float = 0.0
    end: float = 0.0
    stopped_at: float | None = None
    killed: bool = False


class World:
    """The nodes that were started, by task, one list for each start of the task."""

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.loop = loop
        self.draw = draw
        self.starts: dict[str, list[list[Any]]] = defaultdict(list)
        self.stops: dict[str, tuple[float, str]] = {}

    def start(self, name: str, script: str, **options: Any) -> Any:
        world = self
        loop = self.loop
        draw = self.draw

        class Started(Node):
            def __init__(self) -> None:
                super().__init__(name, script, **options)
                self.began = loop.time()
                self.ended: asyncio.Future[int] = loop.create_future()
                if draw.random() < 0.75:
                    loop.call_later(draw.uniform(0, 30), self.ends, draw.choice(STATUSES))

            def ends(self, status: int) -> None:
                if not self.ended.done():
                    self.end = loop.time()
                    self.ended.set_result(status)

            def stop(self) -> None:
                if self.stopped_at is None:
                    self.stopped_at = loop.time()
                    status = draw.choice([KILLED, KILLED, 0, 1])
                    loop.call_later(draw.uniform(0.001, options["grace_s"]), self.ends, status)

            def kill(self) -> None:
                self.killed = not self.ended.done()
                self.stop()
                self.ends(137)

        node = Started()
        task, _, rank = name.rpartition("-")
        if rank == "0":
            world.starts[task].append([])
        world.starts[task][-1].append(node)
        return node


def drawn_tasks(draw: random.Random) -> list[Task]:
    return [
        Task(
            name=f"task{number}",
            num_nodes=draw.randint(1, 3),
            workdir=Path("/work"),
            setup=None,
            run=f"command {number}",
            env={},
            gpus=0,
            max_restarts=draw.randint(0, 2),
            restart_codes=frozenset(draw.sample([1, 2, 7, 137, KILLED], draw.randint(0, 2))),
            primary=draw.random() < 0.4,
            termination_delay_s=draw.choice([0.0, 5.0, 20.0]),
            ignored=(),
            on_volumes=(),
        )
        for number in range(draw.randint(1, 4))
    ]


@dataclass
class Group:
    """What happened to a group."""

    runner: Runner
    world: World
    status: int
    signals: list[tuple[float, int]]
    environments: list[tuple[str, int]]


def happened(seed: int, folder: Path, *, signalled: bool = False) -> Group:
    """Runs a random group to its end."""
    draw = random.Random(seed)
    tasks = drawn_tasks(draw)
    environments: list[tuple[str, int]] = []
    handlers: dict[int, Callable[[], object]] = {}
    signals: list[tuple[float, int]] = []

    def environment(task: Task, rank: int) -> dict[str, str]:
        environments.append((task.name, rank))
        return {"NODE": f"{task.name} {rank}"}

    with simulated(seed) as loop, pytest.MonkeyPatch.context() as patch:
        world = World(loop, draw)

        def add(number: int, handler: Callable[..., object], *given: Any) -> None:
            handlers[number] = lambda: handler(*given)

        patch.setattr(loop, "add_signal_handler", add)
        patch.setattr(loop, "remove_signal_handler", handlers.pop)
        patch.setattr(launcher, "adopt_orphans", lambda: None)
        patch.setattr(launcher, "end_children", lambda: None)
        patch.setattr(runner_module, "Node", world.start)
        stop = TaskRun.stop

        def stopped(run: TaskRun, *state: Any) -> None:
            world.stops.setdefault(run.task.name, (loop.time(), *(state or ("CANCELLED",))))
            stop(run, *state)

        patch.setattr(TaskRun, "stop", stopped)
        screen = Screen([])
        for name in ("say", "tail", "line"):
            patch.setattr(screen, name, lambda *given, **options: None)
        runner = Runner(tasks, environment, screen, folder, grace_s=3.0)
        assert {(run.state, run.status, run.failed) for run in runner.runs} == {
            ("PENDING", 0, None)
        }

        def send(number: int) -> None:
            if number in handlers:
                signals.append((loop.time(), number))
                handlers[number]()

        async def run() -> int:
            if signalled:
                first = draw.uniform(0, 25)
                loop.call_later(first, send, draw.choice([signal.SIGINT, signal.SIGTERM]))
                if draw.random() < 0.5:
                    again = first + draw.uniform(0.0001, 4)
                    loop.call_later(again, send, signal.SIGHUP)
            # Groups in which nothing ends are ended from outside.
            loop.call_later(500.0, send, signal.SIGTERM)
            return await runner.run()

        status = loop.run_until_complete(run())
        assert not handlers, "no handler outlives the run"
    return Group(runner, world, status, signals, environments)


def by_itself(status: int) -> bool:
    return 0 < status < 128 and status != LOST


@dataclass
class Expected:
    """What the rules make of one task, from when its nodes ended and when it was stopped."""

    state: str
    ended: float
    status: int = 0
    restarts: int = 0
    failed: Any = None


def by_the_rules(task: Task, starts: list[list[Any]], stop: tuple[float, str] | None) -> Expected:
    """Checks every start of a task, and returns its end."""
    counted = 0
    for number, nodes in enumerate(starts):
        assert [node.name for node in nodes] == [f"{task.name}-{i}" for i in range(task.num_nodes)]
        ended = max(node.end for node in nodes)
        is_last = number == len(starts) - 1
        if not is_last:
            assert {node.began for node in starts[number + 1]} == {ended}
        failures = [node for node in nodes if node.ended.result() != 0]
        first = min(failures, key=lambda node: node.end, default=None)

        # All of a task's nodes end together, once what made the first one end has ended itself.
        told = [] if stop is None or stop[0] >= ended else [stop[0]]
        if first is not None:
            others = [node.end for node in nodes if node is not first]
            patient = first.ended.result() == LOST
            at = first.end
            if patient:
                at = min(first.end + CAUSE_S, max([first.end, *others]))
            told.append(at)
        for node in nodes:
            due = min(told, default=None)
            if due is not None and node.end > due:
                assert node.stopped_at == pytest.approx(due)

        if stop is not None and stop[0] < ended:
            assert is_last
            return Expected(stop[1], ended, restarts=number)
        if first is None:
            assert is_last
            return Expected("SUCCEEDED", ended, restarts=number)
        in_turn = [first, *nodes]
        cause = next((node for node in in_turn if by_itself(node.ended.result())), first)
        status = cause.ended.result()
        if status == WRONG_SETTING:
            again = False
        elif status in task.restart_codes:
            again = True
        else:
            counted += 1
            again = counted <= task.max_restarts
        assert again is not is_last
        if not again:
            says = nodes[0] if 0 < nodes[0].ended.result() < 128 else cause
            return Expected("FAILED", ended, status, number, says)
    raise AssertionError("never started")


def check(group: Group) -> None:
    """Compares what happened with the rules."""
    world = group.world
    tasks = [run.task for run in group.runner.runs]
    found = {
        task.name: by_the_rules(task, world.starts[task.name], world.stops.get(task.name))
        for task in tasks
    }
    for run in group.runner.runs:
        expected = found[run.task.name]
        assert (run.state, run.restarts) == (expected.state, expected.restarts)
        assert run.failed is expected.failed
        if expected.state == "FAILED":
            assert run.status == expected.status
        assert run.seconds == pytest.approx(expected.ended)

    primary = [task for task in tasks if task.primary] or tasks
    auxiliary = [task for task in tasks if task not in primary]
    succeeded = all(found[task.name].state == "SUCCEEDED" for task in primary)
    failed = [task for task in primary if found[task.name].state == "FAILED"]
    over = max(found[task.name].ended for task in primary)
    for task in auxiliary:
        if found[task.name].state == "FAILED":
            over = min(over, found[task.name].ended)
            failed.append(task)
    if group.signals:
        assert group.status == 128 + group.signals[0][1]
        return
    at = {name: when for name, (when, _) in world.stops.items()}
    if succeeded:
        assert (group.status, group.runner.reason) == (0, None)
        for task in auxiliary:
            if found[task.name].ended > over:
                assert at[task.name] == pytest.approx(over + task.termination_delay_s)
                assert world.stops[task.name][1] == "STOPPED"
    else:
        reason = group.runner.reason
        assert reason is not None
        assert reason.task is failed[0]
        assert group.status == found[failed[0].name].status
        assert list(at.values()) == pytest.approx([over] * len(tasks))
        assert {state for _, state in world.stops.values()} == {"CANCELLED"}


@pytest.mark.parametrize("seed", range(60))
def test_a_random_group_keeps_to_the_rules(seed: int, tmp_path: Path) -> None:
    group = happened(seed, tmp_path)
    check(group)
    started = [
        (node.name.rpartition("-")[0], int(node.name.rpartition("-")[2]), node)
        for starts in group.world.starts.values()
        for nodes in starts
        for node in nodes
    ]
    assert sorted(group.environments) == sorted((name, rank) for name, rank, _ in started)
    for name, rank, node in started:
        task = next(run.task for run in group.runner.runs if run.task.name == name)
        assert (node.script, node.workdir, node.grace_s) == (task.run, task.workdir, 3.0)
        assert node.env == {"NODE": f"{name} {rank}"}
        assert node.log == tmp_path / f"{name}-{rank}.log"


@pytest.mark.parametrize("seed", range(200, 230))
def test_a_signal_ends_every_node_and_a_second_one_kills_them(seed: int, tmp_path: Path) -> None:
    group = happened(seed, tmp_path, signalled=True)
    nodes = [
        node for starts in group.world.starts.values() for started in starts for node in started
    ]
    assert all(node.ended.done() for node in nodes), "nothing is left"
    if not group.signals:
        return
    first, number = group.signals[0]
    stops = group.world.stops.values()
    reason = group.runner.reason
    if min(at for at, _ in stops) == first:
        assert group.status == 128 + number
        assert {state for _, state in stops} == {"CANCELLED"}
    elif max(at for at, _ in stops) < first:
        assert group.status == (reason.status if reason else 0), "it was ending already"
    running = [node for node in nodes if node.end > first]
    assert all(node.began <= first for node in nodes), "nothing starts after it"
    assert all(node.stopped_at is not None and node.stopped_at <= first for node in running)
    second = [at for at, _ in group.signals[1:]]
    for node in running:
        assert node.killed is (bool(second) and node.end >= second[0])
        if second:
            assert node.end <= second[0]


def test_a_log_of_an_earlier_run_is_removed_and_that_of_a_restart_is_kept(tmp_path: Path) -> None:
    group = happened(3, tmp_path)
    runner = group.runner
    task = runner.runs[0].task
    log = tmp_path / f"{task.name}-7.log"
    log.write_text("of another run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "Node", lambda *given, **options: None)
        runner._start(task, 7)
        assert not log.exists()
        log.write_text("of this run")
        runner._start(task, 7)
    assert log.read_text() == "of this run"


async def test_a_task_that_is_stopped_before_it_begins_starts_nothing() -> None:
    started: list[int] = []

    def start(task: Task, rank: int) -> Any:
        started.append(rank)

    run = TaskRun(drawn_tasks(random.Random(0))[0], start, Screen([]))
    run.stop("STOPPED")
    run.stop()
    await run.run()
    assert (run.state, run.nodes, started) == ("STOPPED", [], [])
