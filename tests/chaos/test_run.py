"""The whole local job group under faults of every kind finishes as if nothing had happened, only
later.

What follows from the order of messages, writes and deaths is shown by `tests/simulation`, thousands
of times; this is about real signals, sockets, files and nodes.
"""

from pathlib import Path

import pytest

from tests.chaos.group import ROOT, Group, wait_gone
from tests.chaos.inject import Fault, inject
from tests.chaos.invariants import read_evidence, violations
from tests.support.environments.own_environments import PONDERS

BATCH = 16
LOST_AFTER_S = 10
HANG_S = 8
HOLD_S = max(HANG_S, LOST_AFTER_S) + 2
"""A stop that lasts longer outlives `limits.service_timeout_s` too."""
STEPS = {"answers": 40, "episodes": 16}
FAULTS = {
    "answers": (
        Fault(3, "stop", "trainer-0", HOLD_S),
        Fault(6, "kill", "router"),
        Fault(10, "preempt", "data-server-0"),
        Fault(14, "cut", "replay-buffer"),
        Fault(16, "preempt", "rollout-server-1"),
        Fault(18, "kill", "engine-0"),
        Fault(24, "cut", "agent-1"),
        Fault(28, "kill", "grader"),
        Fault(31, "preempt", "ppo-trainer-1"),
        Fault(34, "preempt", "reward-server-0"),
    ),
    "episodes": (
        Fault(2, "cut", "environment-0"),
        Fault(4, "kill", "engine-1"),
        Fault(7, "stop", "engine-0", HOLD_S),
        Fault(11, "preempt", "environment-server-1"),
        Fault(14, "kill", "router"),
    ),
}
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", ["answers", "episodes"])
def test_every_invariant_holds_after_faults_of_every_kind(
    kind: str, base_model: Path, tmp_path: Path
) -> None:
    steps = STEPS[kind]
    settings = {
        "RUN_CONFIG": str(ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml"),
        "MODEL_NAME": str(base_model),
        "SEED": "0",
        "NUM_EPOCHS": "1",
        "BATCH_SIZE": str(BATCH),
        "MAX_STEPS": str(steps),
        "RLHF_DATA__NUM_SAMPLES": str(steps * BATCH),
        "RLHF_ROLLOUT__HANG_TIMEOUT_S": str(HANG_S),
        "RLHF_TRAINER__MAX_STALENESS": "0",
        "RLHF_CHECKPOINT__EVERY": "5",
        "RLHF_EVALUATION__EVERY": "0",
        "RLHF_EVALUATION__SAMPLES": "128",
        "RLHF_EVALUATION__PASS_SAMPLES": "0",
        "RLHF_LIMITS__LOST_AFTER_S": str(LOST_AFTER_S),
        "RLHF_LIMITS__SERVICE_TIMEOUT_S": "20",
        "RLHF_LIMITS__FENCE_AFTER_S": "90",
        "RLHF_LIMITS__STUCK_AFTER_S": "180",
    }
    if kind == "episodes":
        settings["RLHF_ENVIRONMENT__NAME"] = PONDERS
        settings["RLHF_ENVIRONMENT__DEADLINE_S"] = "120"
    group = Group(tmp_path, settings)
    with group.running():
        injected = inject(group, FAULTS[kind], limit_s=800)
    assert group.process is not None
    assert group.process.returncode == 0, group.output()[-8000:]
    assert wait_gone(group) == []
    assert injected == list(FAULTS[kind])
    assert all(fault.cut != 0 for fault in injected), "there were connections to cut"
    preempted = {fault.target.rpartition("-")[0] for fault in injected if fault.kind == "preempt"}
    assert preempted <= group.restarts().keys()

    evidence = read_evidence(group.run_dir, group.state_dir)
    assert violations(evidence) == [], group.output()[-8000:]
    if kind == "answers":
        # Episodes teach nothing.
        assert evidence.evaluations[-1]["accuracy"] > 0.6, "as an undisturbed run"
    else:
        assert evidence.metrics[-1]["dropped"].get("episode", 0) == 0, (
            "an episode that was lost is played again under the same request"
        )
