"""Runs the whole job group under faults. What follows from the order of messages, writes and deaths
is shown by `tests/simulation`, thousands of times; this is about real signals, sockets and files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.group import ROOT, Group, wait_gone
from tests.chaos.inject import Injected, inject
from tests.chaos.invariants import Evidence, read_evidence, violations
from tests.support.environments.own_environments import PONDERS

BATCH = 16
TARGET_ACCURACY = 0.6
LOST_AFTER_S = 10
SERVICE_TIMEOUT_S = 20
HANG_S = 8


@dataclass
class Outcome:
    """The result of a run."""

    injected: list[Injected]
    evidence: Evidence
    violations: list[str]


def settings(base_model: Path, steps: int) -> dict[str, str]:
    """Returns settings for one epoch of the built-in task, with limits that a stop of half a minute
    exceeds."""
    return {
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
        "RLHF_LIMITS__SERVICE_TIMEOUT_S": str(SERVICE_TIMEOUT_S),
        "RLHF_LIMITS__FENCE_AFTER_S": "90",
        "RLHF_LIMITS__STUCK_AFTER_S": "180",
        "RLHF_SAMPLING__REQUEST_TIMEOUT_S": "60",
    }


def episode_settings() -> dict[str, str]:
    """Returns the extra settings of a run on episodes. They teach nothing, so nobody checks whether
    the run learned."""
    return {"RLHF_ENVIRONMENT__NAME": PONDERS, "RLHF_ENVIRONMENT__DEADLINE_S": "120"}


def chaos(folder: Path, values: dict[str, str], faults: Sequence[Fault], limit_s: float) -> Outcome:
    """Runs the group in `folder` under these faults and checks the invariants."""
    group = Group(folder, values)
    with group.running():
        injected = inject(group, faults, limit_s)
    assert group.process is not None
    left = wait_gone(group)
    evidence = read_evidence(group.run_dir, group.state_dir, group.seen, TARGET_ACCURACY)
    evidence.status = group.process.returncode
    evidence.processes = left
    return Outcome(injected, evidence, violations(evidence))
