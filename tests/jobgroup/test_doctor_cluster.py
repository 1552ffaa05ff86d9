"""The doctor inside a running group: real services on loopback; some are down, one is unwell, one
has a wrong clock."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def _status(
    state: str = "ready", version: int | None = 3, wanted: int | None = 3, registered: bool = True
) -> dict[str, Any]:
    report = {"state": state, "version": version, "detail": "disk full" if state == "stale" else ""}
    return {"report": report, "wanted": wanted, "registered": registered, "engine_starts": 1}


def _looked(
    folder: Path, around: dict[str, str], ports: Mapping[str, int], task: str | None = None
) -> dict[str, Result]:
    plan = plan_of(folder, TASKS, {**INSIDE, **around}, task, env=ports)
    assert plan.problems == []
    return {result.name: result for result in perform(network.cluster_checks(plan))}


def test_every_service_is_reported_with_health_reason_and_clock(
    tmp_path: Path, stack: ExitStack
) -> None:
    healthy = {"/health": {"status": "healthy"}}
    ports = {
        "RLHF_DATA__PORT": stack.enter_context(serving(healthy)),
        "RLHF_REWARD__PORT": free_port(),  # nobody listens there
        "RLHF_REPLAY__PORT": stack.enter_context(
            serving({"/health": {"reason": "the store is locked"}}, status=503)
        ),
        "RLHF_TRAINER__PORT": stack.enter_context(serving(healthy, ahead_s=7200)),
        "RLHF_ROLLOUT__AGENT_PORT": stack.enter_context(
            serving({**healthy, "/status": _status()}, ahead_s=-20)
        ),
        "RLHF_ROLLOUT__ROUTER_PORT": stack.enter_context(serving(healthy)),
    }
    found = _looked(tmp_path, {}, ports)
    states = {name: result.state for name, result in found.items()}
    assert states == {
        "data-server-0": "ok",
        "clock of data-server-0": "ok",
        "reward-server-0": "fail",
        "replay-buffer-0": "fail",
        "clock of replay-buffer-0": "ok",
        "agent of rollout-server-0": "ok",
        "clock of agent of rollout-server-0": "warn",
        "router on rollout-server-0": "ok",
        "clock of router on rollout-server-0": "ok",
        "ppo-trainer-0": "ok",
        "clock of ppo-trainer-0": "fail",
        "weights of rollout-server-0": "ok",
    }
    assert "does not answer" in found["reward-server-0"].found
    assert "says 503: the store is locked" in found["replay-buffer-0"].found
    assert found["clock of ppo-trainer-0"].found.startswith(("+7199.", "+7200.", "+7201."))
    assert " ± " in found["clock of ppo-trainer-0"].found


@pytest.mark.parametrize(
    ("status", "state", "words"),
    [
        (_status(), "ok", "ready, version 3, newest 3"),
        (_status(version=None, wanted=None), "ok", "version base, newest none yet"),
        (_status(version=1), "warn", "version 1, newest 3"),
        (_status(registered=False), "warn", "not in the router"),
        (_status("stale"), "fail", "disk full"),
        ({"unexpected": True}, "fail", "unknown"),
    ],
)
def test_weights_of_a_node_are_compared_with_the_newest(
    tmp_path: Path, stack: ExitStack, status: dict[str, Any], state: str, words: str
) -> None:
    agent = stack.enter_context(serving({"/health": {}, "/status": status}))
    ports = {
        "RLHF_ROLLOUT__AGENT_PORT": agent,
        "RLHF_ROLLOUT__ROUTER_PORT": agent,
        "RLHF_TRAINER__PORT": agent,
    }
    result = _looked(tmp_path, {}, ports, "rollout-server")["weights of rollout-server-0"]
    assert result.state == state
    assert words in result.found


def test_every_node_of_the_environment_server_is_asked_by_trainers_and_itself(
    tmp_path: Path,
) -> None:
    tasks = {
        "data-server": "",
        "rollout-server": "",
        "environment-server": "num_nodes: 2\n",
        "ppo-trainer": "",
    }

    def asked(task: str) -> list[str]:
        plan = plan_of(tmp_path, tasks, {"SKYPILOT_JOBGROUP_NAME": "small"}, task)
        return [check.name for check in network.cluster_checks(plan) if "rollout" not in check.name]

    environments = ["environment-server-0", "environment-server-1"]
    assert asked("ppo-trainer") == ["data-server-0", *environments, "ppo-trainer-0"]
    assert asked("environment-server") == environments
    plan = plan_of(tmp_path, tasks, {"SKYPILOT_JOBGROUP_NAME": "small"}, "environment-server")
    assert "rollout-server" in [job.name for job in plan.jobs]  # which it calls


def test_the_token_of_the_run_is_sent_and_never_shown(tmp_path: Path, stack: ExitStack) -> None:
    token = "0123456789abcdef" * 2
    port = stack.enter_context(serving({"/health": {}}, token=token))
    found = _looked(tmp_path, {"API_TOKEN": token}, {"RLHF_DATA__PORT": port}, "data-server")
    assert list(found) == [
        "data-server-0",
        "clock of data-server-0",
    ]  # a data-server calls no other service
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
    assert "data-server-0.no-such-group.invalid does not resolve" in result.found
    assert "sky jobs queue" in result.fix
