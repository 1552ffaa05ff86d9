"""Where every task runs: on a cluster, under the local runner, and outside a job group."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.request import proxy_bypass

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
    refuse_cpu_build,
)
from tests.support.errors import raises

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


@pytest.mark.parametrize(("found", "refused"), [("2.13.0+cpu", True), ("2.13.0", False)])
def test_a_torch_without_cuda_is_refused_by_its_version(
    found: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.process.topology.version", lambda _: found)
    told: AbstractContextManager[Any] = nullcontext()
    if refused:
        told = raises(ConfigError, field="--use-gpu", value="True")
    with told:
        refuse_cpu_build("--use-gpu", True, "leave it out")


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


@pytest.mark.parametrize("given", ["NO_PROXY", "no_proxy"])
@pytest.mark.parametrize("hosts", [{}, HOSTS])
def test_proxies_are_not_for_calls_within_a_group(
    given: str, hosts: dict[str, LocalHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology.from_env(CLUSTER | {"JOBGROUP_HOSTS": format_hosts(hosts)})
    env = {"http_proxy": "http://127.0.0.1:9", given: "intern.example,other.example"}
    env |= topology.proxy_env(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    spared = ("127.0.0.1", "localhost", "intern.example", topology.host(ROLLOUT, 1))
    assert all(proxy_bypass(host) for host in spared)
    assert not proxy_bypass("huggingface.co")
    assert topology.proxy_env(env) == {name: env[name] for name in ("NO_PROXY", "no_proxy")}
    assert topology.proxy_env({given: "*"}) == {}


def test_a_node_that_does_not_run_is_named() -> None:
    topology = Topology.from_env(CLUSTER | {"JOBGROUP_HOSTS": format_hosts(HOSTS)})
    with raises(ConfigError, field="JOBGROUP_HOSTS", value="reward-server-0.rlhf-math") as caught:
        topology.url(REWARD, 8002)
    assert "data-server-0.rlhf-math" in str(caught.value.remedy)
    with raises(ConfigError, field="JOBGROUP_HOSTS", value="rollout-server-2.rlhf-math"):
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
