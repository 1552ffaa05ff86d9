"""The invariants can fail: each broken history is detected by the check responsible for it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.invariants import Evidence, violations

STEPS, BATCH = 4, 2


def group(position: int) -> dict[str, Any]:
    return {"id": f"g{position}", "position": position}


@pytest.fixture
def good() -> Evidence:
    """Returns a run whose third step was undone once: its stale groups are consumed too."""
    steps = range(1, STEPS + 1)
    positions = range(STEPS * BATCH)
    return Evidence(
        steps=STEPS,
        batch=BATCH,
        metrics=[{"step": step, "update": {"delta_logprob_current": 1e-6}} for step in steps],
        groups=[
            {"step": step, "groups": [group(BATCH * (step - 1) + i) for i in range(BATCH)]}
            for step in steps
        ],
        states={f"g{i}": "consumed" for i in positions} | {"undone": "consumed"},
        evaluations=[{"step": 0, "accuracy": 0.2}, {"step": STEPS, "accuracy": 0.7}],
    )


def test_good_run_has_no_violations(good: Evidence) -> None:
    assert violations(good) == []


def _undone_step_stayed(run: Evidence) -> None:
    run.groups.insert(2, run.groups[2])


def _line_lost(run: Evidence) -> None:
    del run.metrics[1]


def _small_batch(run: Evidence) -> None:
    run.groups[3]["groups"].pop()


def _no_evaluation(run: Evidence) -> None:
    run.evaluations.pop()


def _trained_twice(run: Evidence) -> None:
    run.groups[3]["groups"][1]["position"] = 0


def _next_epoch_instead(run: Evidence) -> None:
    run.groups[1]["groups"][0]["position"] = STEPS * BATCH + 1


def _stored_lost(run: Evidence) -> None:
    del run.states["g6"]


def _not_acknowledged(run: Evidence) -> None:
    run.states["g6"] = "leased"


def _one_too_many(run: Evidence) -> None:
    run.states["x"] = "fresh"


def _said_another_version(run: Evidence) -> None:
    run.metrics[2]["update"]["delta_logprob_current"] = 0.01


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (_undone_step_stayed, "steps"),
        (_line_lost, "steps"),
        (_small_batch, "steps"),
        (_no_evaluation, "steps"),
        (_trained_twice, "exactly_once"),
        (_next_epoch_instead, "exactly_once"),
        (_stored_lost, "acknowledged"),
        (_not_acknowledged, "acknowledged"),
        (_one_too_many, "acknowledged"),
        (_said_another_version, "weights"),
    ],
)
def test_a_broken_history_is_found(
    good: Evidence, damage: Callable[[Evidence], None], check: str
) -> None:
    damage(good)
    assert check in {found.partition(":")[0] for found in violations(good)}


def test_position_logged_as_left_out_is_not_missing(good: Evidence) -> None:
    _next_epoch_instead(good)
    good.left_out = {2, STEPS * BATCH}
    assert violations(good) == []
