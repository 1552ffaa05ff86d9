"""The whole local job group under seeded faults of every kind: it ends as if nothing had happened, only later."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.faults import schedule
from tests.chaos.run import HANG_S, LOST_AFTER_S, chaos, report, settings

STEPS, FAULTS, SEED = 40, 7, 14
HOLD_S = (max(HANG_S, LOST_AFTER_S) + 2, max(HANG_S, LOST_AFTER_S) + 3)
"""A stop that lasts longer outlives `trainer.service_timeout_s` too: `make chaos`."""
pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_every_invariant_holds_after_faults_of_every_kind(base_model: Path, tmp_path: Path) -> None:
    faults = schedule(SEED, STEPS, FAULTS, HOLD_S)
    outcome = chaos(tmp_path, settings(base_model, STEPS), faults, SEED, limit_s=800)
    report([outcome], Console(width=120))
    assert outcome.violations == [], (tmp_path / "output.txt").read_text()[-8000:]
    assert [(fault["kind"], fault["target"]) for fault in outcome.faults] == [(fault.kind, fault.target) for fault in faults]
    assert {fault["kind"] for fault in outcome.faults} == {"kill", "stop", "cut", "preempt"}
    assert all(fault["cut"] > 0 for fault in outcome.faults if fault["kind"] == "cut"), "there were connections to cut"
