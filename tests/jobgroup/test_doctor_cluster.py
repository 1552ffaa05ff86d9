"""The doctor inside a running group: real services on loopback; some are down, one is unwell."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from jobgroup.doctor import network
from jobgroup.doctor.report import Result, perform
from tests.support.doctor_groups import plan_of, serving
from tests.support.ports import free_port

TASKS = dict.fromkeys(
    ("data-server", "reward-server", "replay-buffer", "rollout-server", "ppo-trainer"), ""
)
HOSTS = ",".join(f"{name}-0.small=127.0.0.1:0" for name in TASKS)
INSIDE = {"SKYPILOT_JOBGROUP_NAME": "small", "JOBGROUP_HOSTS": HOSTS}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _looked(
    folder: Path, around: dict[str, str], ports: Mapping[str, int], task: str | None = None
) -> dict[str, Result]:
    plan = plan_of(folder, TASKS, {**INSIDE, **around}, task, env=ports)
    assert plan.problems == []
    return {result.name: result for result in perform(list(network.cluster_checks(plan)))}


def test_every_service_is_reported_with_health_and_reason(tmp_path: Path, stack: ExitStack) -> None:
    healthy = {"/health": {"status": "healthy"}}
    ports = {
        "RLHF_DATA__PORT": stack.enter_context(serving(healthy)),
        "RLHF_REWARD__PORT": free_port(),  # nobody listens there
        "RLHF_REPLAY__PORT": stack.enter_context(
            serving({"/health": {"reason": "the store is locked"}}, status=503)
        ),
        "RLHF_TRAINER__PORT": stack.enter_context(serving(healthy)),
        "RLHF_ROLLOUT__AGENT_PORT": stack.enter_context(serving(healthy)),
        "RLHF_ROLLOUT__ROUTER_PORT": stack.enter_context(serving(healthy)),
    }
    found = _looked(tmp_path, {}, ports)
    states = {name: result.state for name, result in found.items()}
    assert states == {
        "data-server-0": "ok",
        "reward-server-0": "fail",
        "replay-buffer-0": "fail",
        "agent of rollout-server-0": "ok",
        "router on rollout-server-0": "ok",
        "ppo-trainer-0": "ok",
    }
    assert "does not answer" in found["reward-server-0"].found
    assert "says 503: the store is locked" in found["replay-buffer-0"].found


def test_every_node_of_the_environment_server_is_asked(tmp_path: Path) -> None:
    tasks = {"data-server": "num_nodes: 2\n", "environment-server": "num_nodes: 2\n"}
    plan = plan_of(tmp_path, tasks, {"SKYPILOT_JOBGROUP_NAME": "small"}, "environment-server")
    assert [check.name for check in network.cluster_checks(plan)] == [
        "data-server-0",
        "environment-server-0",
        "environment-server-1",
    ]


def test_the_token_of_the_run_is_sent_and_never_shown(tmp_path: Path, stack: ExitStack) -> None:
    token = "0123456789abcdef" * 2
    port = stack.enter_context(serving({"/health": {}}, token=token))
    found = _looked(tmp_path, {"API_TOKEN": token}, {"RLHF_DATA__PORT": port}, "data-server")
    assert found["data-server-0"].state == "ok"
    refused = _looked(
        tmp_path,
        {"API_TOKEN": "another-token-of-this-run"},
        {"RLHF_DATA__PORT": port},
        "data-server",
    )
    assert refused["data-server-0"].state == "fail"
    assert "API_TOKEN" in refused["data-server-0"].fix
    assert "another-token" not in refused["data-server-0"].text()


def test_a_name_that_does_not_resolve_says_whose_it_is(tmp_path: Path) -> None:
    around = {"SKYPILOT_JOBGROUP_NAME": "no-such-group.invalid", "JOBGROUP_HOSTS": ""}
    result = _looked(tmp_path, around, {}, "data-server")["data-server-0"]
    assert result.state == "fail"
    assert "data-server-0.no-such-group.invalid:8000 does not answer: [Errno" in result.found
    assert "has the YAML another name than no-such-group.invalid" in result.fix
    assert "sky jobs queue" in result.fix
