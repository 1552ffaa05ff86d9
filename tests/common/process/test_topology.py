"""Where every task runs: on a cluster, under the local runner, and outside a job group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.process.topology import (
    DATA,
    REWARD,
    ROLLOUT,
    LocalHost,
    Topology,
    format_hosts,
    parse_hosts,
)
from tests.support.paths import ROOT

CLUSTER = {
    "SKYPILOT_JOBGROUP_NAME": "rlhf-math",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
HOSTS = {
    "data-server-0.rlhf-math": LocalHost("127.0.0.2"),
    "rollout-server-0.rlhf-math": LocalHost("127.0.0.3"),
    "rollout-server-1.rlhf-math": LocalHost("127.0.0.4", 100),
}


def test_on_a_cluster_tasks_have_names_and_listen_everywhere() -> None:
    topology = Topology.from_env(CLUSTER)
    assert topology.url(DATA, 8000) == "http://data-server-0.rlhf-math:8000"
    assert topology.url(ROLLOUT, 30001, node=1) == "http://rollout-server-1.rlhf-math:30001"
    assert topology.bind(ROLLOUT, 30001) == ("0.0.0.0", 30001)  # noqa: S104
    assert topology.own_name(ROLLOUT) == "rollout-server-1"


def test_the_local_runner_gives_names_loopback_addresses_and_shifts() -> None:
    topology = Topology.from_env(CLUSTER | {"JOBGROUP_HOSTS": format_hosts(HOSTS)})
    assert topology.local_hosts == HOSTS
    assert topology.url(DATA, 8000) == "http://127.0.0.2:8000"
    assert topology.url(ROLLOUT, 30001, node=1) == "http://127.0.0.4:30101"
    assert topology.bind(ROLLOUT, 30001) == ("127.0.0.4", 30101)


def test_outside_a_job_group_everything_is_on_this_machine() -> None:
    topology = Topology.from_env({})
    assert topology.group is None
    assert topology.url(REWARD, 8002) == "http://127.0.0.1:8002"
    assert topology.bind(REWARD, 8002) == ("127.0.0.1", 8002)
    assert topology.own_name(REWARD) == "reward-server-0"


def test_a_node_that_does_not_run_is_named() -> None:
    topology = Topology.from_env(CLUSTER | {"JOBGROUP_HOSTS": format_hosts(HOSTS)})
    with pytest.raises(
        ConfigError, match=r"reward-server-0\.rlhf-math is not a node of this run"
    ) as caught:
        topology.url(REWARD, 8002)
    assert "data-server-0.rlhf-math" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="rollout-server-2"):
        topology.url(ROLLOUT, 30001, node=2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK"),
        ({"SKYPILOT_NODE_RANK": "-1"}, "SKYPILOT_NODE_RANK"),
        ({"SKYPILOT_NUM_NODES": "two"}, "SKYPILOT_NUM_NODES"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.4"}, "SKYPILOT_NODE_IPS"),
        ({"SKYPILOT_NUM_GPUS_PER_NODE": "1.5"}, "SKYPILOT_NUM_GPUS_PER_NODE"),
        ({"SKYPILOT_NUM_GPUS_PER_NODE": ""}, "SKYPILOT_NUM_GPUS_PER_NODE"),
        ({"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK"),
        ({"JOBGROUP_HOSTS": "data-server-0.rlhf-math"}, "JOBGROUP_HOSTS"),
    ],
)
def test_an_impossible_environment_is_refused(change: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology.from_env(CLUSTER | change)
    assert field in str(caught.value.field)


@pytest.mark.parametrize(
    "entry", ["name", "=127.0.0.1", "name=", "name=127.0.0.1:x", "name=127.0.0.1:-1"]
)
def test_a_malformed_host_is_named(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(f"a=127.0.0.2,{entry}")
    assert caught.value.value == entry


def test_hosts_survive_the_round_trip() -> None:
    assert parse_hosts(format_hosts(HOSTS)) == HOSTS
    assert parse_hosts("") == {}


def test_torchrun_spans_the_nodes_of_the_task() -> None:
    command = Topology.from_env(CLUSTER).torchrun(["-m", "trainer", "--trainer.batch_size", "4"])
    assert command[:2] == [sys.executable, "-c"]
    assert "from torch.distributed.run import main" in command[2]
    options = dict(zip(command[3:13:2], command[4:13:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "8",
        "--master-addr": "10.0.0.4",
        "--master-port": "29500",
    }
    assert command[13:] == ["-m", "trainer", "--trainer.batch_size", "4"]
    assert "--nproc-per-node 1 --master-addr 127.0.0.1" in " ".join(
        Topology.from_env({}).torchrun([])
    )


def test_torchrun_of_two_local_runs_listens_on_different_ports() -> None:
    def command(block: int) -> str:
        hosts = f"ppo-trainer-0.g=127.{block}.5.1:0,ppo-trainer-1.g=127.{block}.5.2:0"
        env = {
            "SKYPILOT_JOBGROUP_NAME": "g",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": f"127.{block}.5.1\n127.{block}.5.2",
            "JOBGROUP_HOSTS": hosts,
        }
        return " ".join(Topology.from_env(env).torchrun([]))

    assert "--master-addr 127.7.5.1 --master-port 29507" in command(7)
    assert "--master-addr 127.8.5.1 --master-port 29508" in command(8)


@pytest.mark.integration
@pytest.mark.parametrize("arguments", [[], ["torchrun"], ["elsewhere", "-m", "trainer"]])
def test_the_command_prints_its_usage(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "common.process.topology", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1
    assert "usage: python -m common.process.topology torchrun" in done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "status", "last"),
    [
        (
            "import os, time; from common.process.cli import fail; from common.errors import ConfigError\n"
            "if os.environ['RANK'] == '0': fail(ConfigError('the reason'))\n"
            "time.sleep(1); print('the other one', file=os.sys.stderr); os._exit(75)",
            2,
            "rank 0: error: the reason",
        ),
        (
            "import os, sys; print('the reason', file=sys.stderr); sys.stderr.flush(); os._exit(2)",
            2,
            "the reason",
        ),
        ("import os; os.kill(os.getpid(), 9)", 137, "rank 0 was ended by signal 9"),
    ],
)
def test_torchrun_ends_with_the_reason_and_status_of_the_failed_rank(
    tmp_path: Path, script: str, status: int, last: str
) -> None:
    (tmp_path / "rank.py").write_text(script)
    command = [
        sys.executable,
        "-m",
        "common.process.topology",
        "torchrun",
        str(tmp_path / "rank.py"),
    ]
    env = {
        **os.environ,
        "SKYPILOT_NUM_GPUS_PER_NODE": "2" if "RANK" in script else "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (status, last)
