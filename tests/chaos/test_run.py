"""The whole local job group under seeded faults of every kind finishes as if nothing had happened,
only later."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.faults import EPISODES, schedule
from tests.chaos.run import HANG_S, LOST_AFTER_S, chaos, episode_settings, report, settings

STEPS, FAULTS, SEED = 40, 7, 14
HOLD_S = (max(HANG_S, LOST_AFTER_S) + 2, max(HANG_S, LOST_AFTER_S) + 3)
"""A stop that lasts longer outlives `limits.service_timeout_s` too: `make chaos`."""
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_every_invariant_holds_after_faults_of_every_kind(base_model: Path, tmp_path: Path) -> None:
    faults = schedule(SEED, STEPS, FAULTS, HOLD_S)
    outcome = chaos(tmp_path, settings(base_model, STEPS), faults, SEED, limit_s=800)
    report([outcome], Console(width=120))
    assert outcome.violations == [], (tmp_path / "output.txt").read_text()[-8000:]
    assert [(fault["kind"], fault["target"]) for fault in outcome.faults] == [
        (fault.kind, fault.target) for fault in faults
    ]
    assert {fault["kind"] for fault in outcome.faults} == {"kill", "stop", "cut", "preempt"}
    assert all(fault["cut"] > 0 for fault in outcome.faults if fault["kind"] == "cut"), (
        "there were connections to cut"
    )


def test_every_invariant_holds_for_episodes_on_two_nodes(base_model: Path, tmp_path: Path) -> None:
    steps, count = 16, 5
    faults = schedule(SEED, steps, count, HOLD_S, EPISODES)
    outcome = chaos(
        tmp_path, settings(base_model, steps) | episode_settings(), faults, SEED, limit_s=800
    )
    report([outcome], Console(width=120))
    assert outcome.violations == [], (tmp_path / "output.txt").read_text()[-8000:]
    assert len(outcome.faults) == count
    assert outcome.episodes == steps * 16 * 8
    assert outcome.dropped.get("episode", 0) == 0, (
        "an episode that was lost is played again under the same request"
    )
