"""One of two real nodes is killed, stopped or fails: the other ends too and names it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from common.process.topology import LOST, Topology
from common.process.watchdog import RankWhere
from learning.liveness import Liveness
from learning.ranks import Ranks
from tests.support.paths import ROOT
from tests.support.processes.forks import Forked
from tests.support.processes.processes import marked
from tests.support.processes.waits import until
from trainer.diagnosis.live import collective

pytestmark = pytest.mark.integration

ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Nodes:
    """Two nodes with one rank each."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.mark, self._stack = directory, f"liveness-{uuid.uuid4()}", stack
        self.processes: list[subprocess.Popen[bytes] | Forked] = []

    def start(self, part: str, limit_s: float, torchrun: bool = False) -> None:
        """Starts both ranks. Without torchrun they get its variables from here, which is
        quicker."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        worker, arguments = (
            "tests.support.workers.liveness",
            (str(self.directory), part, str(limit_s)),
        )
        for node in range(2):
            env = os.environ | {
                **{"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                **{
                    "RANK": str(node),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                },
                **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port)},
                **{
                    "SKYPILOT_NODE_RANK": str(node),
                    "SKYPILOT_NUM_NODES": "2",
                    "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
                },
                "LIVENESS_MARK": f"{self.mark}-{node}",
            }
            if torchrun:
                command = [
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nnodes",
                        "2",
                        "--node-rank",
                        str(node),
                    ),
                    *(
                        "--nproc-per-node",
                        "1",
                        "--master-addr",
                        ADDRESSES[0],
                        "--master-port",
                        str(port),
                    ),
                    *("-m", worker, *arguments),
                ]
                output = self._stack.enter_context(self._log(node).open("wb"))
                process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
                self.processes.append(self._stack.enter_context(process))
            else:
                self.processes.append(Forked(worker, *arguments, log=self._log(node), env=env))
            self._stack.callback(self.signal, node, signal.SIGKILL)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        self._until(self._ready)

    def _until(self, holds: Callable[[], bool]) -> None:
        until(holds, lambda: self.text(0) + self.text(1), *self.processes)

    def _ready(self) -> bool:
        return all((self.directory / f"ready{rank}").exists() for rank in range(2))

    def answer(self, name: str) -> RankWhere:
        """Waits for a file of the part `ask` and returns what it says of rank 1."""
        path = self.directory / f"{name}.json"
        self._until(path.exists)
        return RankWhere.model_validate_json(path.read_text())

    def signal(self, node: int, number: int) -> None:
        """Signals all processes of a node, torchrun first."""
        process = self.processes[node]
        if isinstance(process, Forked):
            process.send_signal(number)
        else:
            for pid in sorted(marked(f"{self.mark}-{node}")):
                with suppress(ProcessLookupError):  # it ended with torchrun
                    os.kill(pid, number)

    def _log(self, node: int) -> Path:
        return self.directory / f"node{node}.txt"

    def status(self, node: int) -> int:
        return self.processes[node].wait(timeout=400)

    def text(self, node: int) -> str:
        return self._log(node).read_text()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


@pytest.mark.parametrize(
    ("part", "lost"),
    [
        ("step", 0),
        pytest.param("wait", 1, marks=pytest.mark.slow),
        pytest.param("step", 1, marks=pytest.mark.slow),
        pytest.param("wait", 0, marks=pytest.mark.slow),
    ],
)
def test_the_other_node_ends_and_names_a_killed_one(nodes: Nodes, part: str, lost: int) -> None:
    """Kills it in a collective, whose own error is a foreign stack trace, or while rank 0 waits for
    something else."""
    nodes.start(part, limit_s=60, torchrun=True)
    nodes.signal(lost, signal.SIGKILL)
    assert nodes.status(1 - lost) != 0
    text = nodes.text(1 - lost)
    who = f"rank {lost} on ppo-trainer-{lost} ({ADDRESSES[lost]})"
    assert f"{who} is lost: its process was killed" in text
    assert "continues from its newest checkpoint" in text
    assert "liveness.py" in text.partition(" was here:")[2]  # where the rank waited
    assert (
        f"exitcode  : {LOST}" in text or lost == 0
    )  # in torchrun's own report, unless node 0 is gone


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_rank_is_lost(nodes: Nodes, stopped: int) -> None:
    """Imitates a node without power or network: connections stay open, but nothing arrives any
    more."""
    nodes.start("step", limit_s=10)
    nodes.signal(stopped, signal.SIGSTOP)
    assert nodes.status(1 - stopped) != 0
    who = f"rank {stopped} on ppo-trainer-{stopped} ({ADDRESSES[stopped]})"
    assert f"{who} is lost: silent for 10 s (limits.lost_after_s)" in nodes.text(1 - stopped)


@pytest.mark.slow
def test_ranks_that_were_all_stopped_for_long_go_on(nodes: Nodes) -> None:
    """Imitates a machine that sleeps: each rank heard nothing from the other, but was stopped
    itself."""
    limit_s = 8.0
    nodes.start("step", limit_s)
    for node in range(2):
        nodes.signal(node, signal.SIGSTOP)
    time.sleep(1.5 * limit_s)
    for node in range(2):
        nodes.signal(node, signal.SIGCONT)
    time.sleep(2)  # the next judgements

    nodes.signal(0, signal.SIGTERM)

    assert nodes.status(1) != 0
    assert (
        "rank 0 on ppo-trainer-0 (127.0.0.1) was stopped (SIGTERM or Ctrl-C) and has left the run"
        in nodes.text(1)
    )
    assert "is lost:" not in nodes.text(0) + nodes.text(1)


def test_an_error_of_one_rank_is_reported_by_the_other(nodes: Nodes) -> None:
    nodes.start("fail", limit_s=60)
    assert nodes.status(0) != 0
    assert (
        "rank 1 on ppo-trainer-1 (127.0.0.2) has failed: ServiceError: no room on the device"
        in nodes.text(0)
    )
    assert nodes.status(1) != 0


def test_a_rank_that_was_told_to_end_is_not_called_lost(nodes: Nodes) -> None:
    """A pod that is taken away gets SIGTERM first."""
    nodes.start("step", limit_s=60)
    nodes.signal(0, signal.SIGTERM)
    assert nodes.status(1) != 0
    assert (
        "rank 0 on ppo-trainer-0 (127.0.0.1) was stopped (SIGTERM or Ctrl-C) and has left the run"
        in nodes.text(1)
    )
    assert "is lost:" not in nodes.text(1)


def test_a_rank_that_is_told_to_end_at_once_is_not_called_lost(nodes: Nodes) -> None:
    nodes.start("leave", limit_s=60)
    assert nodes.status(1) != 0
    assert "was stopped (SIGTERM or Ctrl-C) and has left the run" in nodes.text(1)
    assert "is lost:" not in nodes.text(1)


@pytest.mark.slow
def test_a_rank_that_computes_for_long_or_has_ended_is_not_lost(nodes: Nodes) -> None:
    nodes.start("compute", limit_s=2)
    assert [nodes.status(node) for node in range(2)] == [0, 0]
    assert all((nodes.directory / f"done{rank}").exists() for rank in range(2))
    assert "is lost:" not in nodes.text(0) + nodes.text(1)


def test_rank_0_says_where_the_others_are(nodes: Nodes) -> None:
    """Also where a rank is that waits in a collective, and that a stopped one does not answer."""
    nodes.start("ask", limit_s=120)
    where = nodes.answer("where")
    assert where.rank == 1
    assert where.name == f"rank 1 on ppo-trainer-1 ({ADDRESSES[1]})"
    assert where.pid == nodes.processes[1].pid
    assert collective(where.stacks) == "all_reduce"

    nodes.signal(1, signal.SIGSTOP)
    silent = nodes.answer("silent")
    assert (silent.name, silent.pid, silent.stacks) == (where.name, 0, "")

    nodes.signal(1, signal.SIGCONT)
    assert [nodes.status(node) for node in range(2)] == [0, 0]


def test_a_single_process_is_not_watched() -> None:
    before = set(threading.enumerate())
    with Liveness(Ranks(), Topology(), lost_after_s=0.01, stuck_after_s=1.0):
        assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_a_rank_that_loads_for_long_is_waited_for(nodes: Nodes) -> None:
    nodes.start("load", limit_s=3)
    assert [nodes.status(node) for node in range(2)] == [0, 0], nodes.text(0)


def test_a_rank_that_stops_loading_ends_all_and_is_named(nodes: Nodes) -> None:
    """Its beats go on: it is not lost, but nothing moves any more."""
    nodes.start("stuck", limit_s=3)
    assert [nodes.status(node) for node in range(2)] == [LOST, LOST]
    for rank in range(2):
        text = nodes.text(rank)
        assert "no rank has made progress for 3 s (limits.stuck_after_s)" in text
        assert "rank 0 on ppo-trainer-0 (127.0.0.1): waiting for the other ranks (no" in text
        assert "rank 1 on ppo-trainer-1 (127.0.0.2): loading the model (no progress for" in text
        assert "is lost:" not in text
    assert "in _load" in nodes.text(1).partition(" was here:")[2]
