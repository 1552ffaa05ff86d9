"""The whole local job group under faults of every kind finishes as if nothing had happened, only
later."""

from pathlib import Path

import pytest

from tests.chaos.faults import Fault
from tests.chaos.run import BATCH, HANG_S, LOST_AFTER_S, chaos, episode_settings, settings

HOLD_S = max(HANG_S, LOST_AFTER_S) + 2
"""A stop that lasts longer outlives `limits.service_timeout_s` too."""
FAULTS = [
    Fault(3, 0.6, "stop", "trainer-0", HOLD_S),
    Fault(6, 0.5, "kill", "router"),
    Fault(10, 0.5, "preempt", "data-server-0"),
    Fault(14, 0.2, "cut", "replay-buffer"),
    Fault(18, 0.1, "kill", "engine-0"),
    Fault(24, 0.0, "cut", "agent-1"),
    Fault(28, 0.3, "kill", "grader"),
    Fault(34, 0.2, "preempt", "reward-server-0"),
]
FAULTS_OF_EPISODES = [
    Fault(2, 0.1, "cut", "environment-0"),
    Fault(4, 0.3, "kill", "engine-1"),
    Fault(7, 0.5, "stop", "engine-0", HOLD_S),
    Fault(11, 0.2, "preempt", "environment-server-1"),
    Fault(14, 0.6, "kill", "router"),
]
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_every_invariant_holds_after_faults_of_every_kind(base_model: Path, tmp_path: Path) -> None:
    outcome = chaos(tmp_path, settings(base_model, steps=40), FAULTS, limit_s=800)
    assert outcome.violations == [], (tmp_path / "output.txt").read_text()[-8000:]
    assert [injected.fault for injected in outcome.injected] == FAULTS
    assert all(each.cut > 0 for each in outcome.injected if each.fault.kind == "cut"), (
        "there were connections to cut"
    )


def test_every_invariant_holds_for_episodes_on_two_nodes(base_model: Path, tmp_path: Path) -> None:
    steps = 16
    values = settings(base_model, steps) | episode_settings()
    outcome = chaos(tmp_path, values, FAULTS_OF_EPISODES, limit_s=800)
    assert outcome.violations == [], (tmp_path / "output.txt").read_text()[-8000:]
    assert [injected.fault for injected in outcome.injected] == FAULTS_OF_EPISODES
    evidence = outcome.evidence
    assert len(evidence.trained()) * evidence.group_size == steps * BATCH * 8
    assert evidence.metrics[-1]["dropped"].get("episode", 0) == 0, (
        "an episode that was lost is played again under the same request"
    )
