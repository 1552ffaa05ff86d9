"""Spot nodes: a rollout node and a trainer node are preempted and come back. The run loses only
time."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.faults import Fault
from tests.chaos.group import Group, wait_gone
from tests.chaos.inject import inject
from tests.chaos.invariants import read_evidence, violations
from tests.chaos.run import settings
from tests.chaos.targets import health_url

STEPS = 18
FAULTS = [Fault(4, 0.3, "preempt", "rollout-server-1"), Fault(11, 0.3, "preempt", "ppo-trainer-1")]
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_preempted_nodes_rejoin_the_run_at_its_current_step(
    base_model: Path, tmp_path: Path
) -> None:
    # The limits of a usual run, which nothing here exceeds.
    values = {
        name: value
        for name, value in settings(base_model, STEPS).items()
        if not name.endswith("TIMEOUT_S")
    }
    group = Group(tmp_path, values | {"RLHF_EVALUATION__SAMPLES": "0"})
    served: dict[str, dict[str, Any]] = {}
    with group.running():
        watcher = threading.Thread(target=_ask_agents, args=(group, served), daemon=True)
        watcher.start()
        preempted = inject(group, FAULTS, limit_s=500)
        watcher.join()
    assert group.process is not None
    assert group.process.returncode == 0, group.output()[-6000:]
    assert wait_gone(group) == []
    assert [injected.fault for injected in preempted] == FAULTS
    assert all(
        injected.healthy_s is not None and injected.next_step_s(group) is not None
        for injected in preempted
    )
    assert {"rollout-server": 1, "ppo-trainer": 1}.items() <= group.restarts().items()
    # Both rollout nodes get traffic again, with weights made after the preemption.
    assert sorted(served) == ["rollout-server-0", "rollout-server-1"]
    assert all(
        status["registered"] and status["report"]["version"] > FAULTS[0].step
        for status in served.values()
    )
    assert f"continuing after step {FAULTS[1].step // 5 * 5}" in group.output()
    evidence = read_evidence(group.run_dir, group.state_dir, group.seen, target_accuracy=0.0)
    assert [each for each in violations(evidence) if not each.startswith("accuracy: ")] == []
    assert evidence.metrics[-1]["dropped"] == {}
    assert {position for _, position, _ in evidence.stored.values()} == set(range(evidence.prompts))


def _ask_agents(group: Group, served: dict[str, dict[str, Any]]) -> None:
    """Records `GET /status` of both agents, as soon as each gets traffic between the two
    preemptions."""
    limit = time.monotonic() + 500
    first, second = (fault.step for fault in FAULTS)
    while len(served) < 2 and group.step() <= second and time.monotonic() < limit:
        time.sleep(0.2)
        if group.step() < first + 2 or "restart 1 of rollout-server" not in group.output():
            continue
        for rank in range(2):
            url = health_url(f"agent-{rank}", group.config(), group.processes())
            if url is None:
                continue
            try:
                headers = {
                    "authorization": f"Bearer {(group.folder / 'logs' / 'api_token').read_text()}"
                }
                status = httpx.get(
                    url.replace("/health", "/status"), headers=headers, timeout=5, trust_env=False
                ).json()
            except httpx.HTTPError:
                continue
            if status["registered"]:
                served[status["report"]["name"]] = status
