"""The launcher of the trainer's ranks: torchrun's arguments, its port, and how it ends."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.process.topology import Topology
from tests.support.paths import ROOT
from trainer.cli.launch import torchrun_arguments

CLUSTER = {
    "SKYPILOT_JOBGROUP_NAME": "rlhf-math",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}


def test_torchrun_spans_the_nodes_of_the_task() -> None:
    program = ["-m", "trainer", "--trainer.batch_size", "4"]
    arguments = torchrun_arguments(Topology.from_env(CLUSTER), program)
    options = dict(zip(arguments[:10:2], arguments[1:10:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "8",
        "--master-addr": "10.0.0.4",
        "--master-port": "29500",
    }
    assert arguments[10:] == program
    alone = " ".join(torchrun_arguments(Topology.from_env({}), []))
    assert "--nproc-per-node 1 --master-addr 127.0.0.1" in alone


def test_torchrun_of_two_local_runs_listens_on_different_ports() -> None:
    def command(block: int) -> str:
        hosts = f"ppo-trainer-0.g=127.{block}.5.1:0,ppo-trainer-1.g=127.{block}.5.2:0"
        env = {
            "SKYPILOT_JOBGROUP_NAME": "g",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": f"127.{block}.5.1\n127.{block}.5.2",
            "JOBGROUP_HOSTS": hosts,
        }
        return " ".join(torchrun_arguments(Topology.from_env(env), []))

    assert "--master-addr 127.7.5.1 --master-port 29507" in command(7)
    assert "--master-addr 127.8.5.1 --master-port 29508" in command(8)


@pytest.mark.integration
def test_a_taken_port_of_torchrun_is_one_line_with_the_remedy() -> None:
    # 127.N.… gets port 29500 + N; choose a block that no other run on this machine uses.
    for block in range(240, 250):
        port = Topology(local_hosts={"a": None}, node_ips=(f"127.{block}.0.1",)).torchrun_port  # type: ignore[dict-item]
        try:
            taken = socket.create_server(("", port))
            break
        except OSError:
            continue
    env = os.environ | {
        "SKYPILOT_JOBGROUP_NAME": "g",
        "JOBGROUP_HOSTS": f"a-0.g=127.{block}.0.1",
        "SKYPILOT_NODE_IPS": f"127.{block}.0.1",
    }
    with taken:
        command = [sys.executable, "-m", "trainer.launch"]
        ended = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.returncode == 2
    assert f"torchrun cannot listen on port {port}" in ended.stderr
    assert "remedy: end the process that uses it" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "status", "last"),
    [
        (
            "import os, time; from pathlib import Path; from common.process.cli import fail\n"
            "from common.errors import ConfigError; from tests.support.processes.processes import alive\n"
            "first = Path(__file__).with_name('first')\n"
            "if os.environ['RANK'] == '0':\n"
            "    first.write_text(str(os.getpid())); fail(ConfigError('the reason'))\n"
            "while not first.exists() or not first.read_text() or alive(int(first.read_text())): time.sleep(0.01)\n"
            "time.sleep(1); print('the other one', file=os.sys.stderr); os._exit(75)",
            2,
            "rank 0: error: the reason",
        ),
        (
            "import os, sys; print('the reason', file=sys.stderr); sys.stderr.flush(); os._exit(2)",
            2,
            "the reason",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "error: rank 0 was killed by SIGKILL (status 137; the kernel does so when memory runs out)"
            " · code: rank_killed",
        ),
    ],
)
def test_torchrun_ends_with_the_reason_and_status_of_the_failed_rank(
    tmp_path: Path, script: str, status: int, last: str
) -> None:
    (tmp_path / "rank.py").write_text(script)
    command = [sys.executable, "-m", "trainer.launch", str(tmp_path / "rank.py")]
    env = {
        **os.environ,
        "SKYPILOT_NUM_GPUS_PER_NODE": "2" if "RANK" in script else "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (status, last)
