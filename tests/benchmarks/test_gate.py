"""The history gate: bands from recorded runs, and planted regressions of real training."""

import dataclasses
import functools
import math
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from benchmarks import gate
from benchmarks.gate_history import HISTORY, RULES, Line, append, band, judge, read
from common.clients import rollout
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.policy import Policy

HERE = {"processor": "this one"}


def lines(name: str, values: list[float], machine: dict[str, str] = HERE) -> list[Line]:
    return [
        Line(commit="0", date="2026-11-25", seed=seed, machine=machine, figures={name: value})
        for seed, value in enumerate(values)
    ]


def test_a_band_is_four_deviations_or_the_floor() -> None:
    wide = [0.5, 0.6, 0.7, 0.8, 0.9]
    found = band("accuracy", lines("accuracy", wide), HERE)
    assert found is not None
    assert found.low == pytest.approx(mean(wide) - 4 * stdev(wide))
    assert found.high == math.inf

    found = band("accuracy", lines("accuracy", [0.9] * 5), HERE)
    assert found is not None
    assert found.low == pytest.approx(0.84)

    found = band("grad_norm", lines("grad_norm", [2.0] * 5), HERE)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([1.3, 2.7])


def test_a_cost_is_judged_only_beside_the_same_kind_of_machine() -> None:
    other = lines("update", [10.0] * 9, {"processor": "another"})
    assert band("update", [*other, *lines("update", [5.0] * 4)], HERE) is None
    found = band("update", [*other, *lines("update", [5.0] * 5)], HERE)
    assert found is not None
    assert found.high == pytest.approx(5.5)


def test_what_is_learned_is_judged_only_beside_the_same_base_model() -> None:
    here = HERE | {"base_model": "0f"}
    other = lines("accuracy", [0.9] * 9, HERE | {"base_model": "e1"})
    assert band("accuracy", other, here) is None
    assert band("accuracy", lines("accuracy", [0.9] * 5, {"base_model": "0f"}), here) is not None


def test_what_is_outside_or_no_number_fails_and_is_named(tmp_path: Path) -> None:
    for line in lines("accuracy", [0.9] * 5):
        append("demo", line, tmp_path)
    (low,) = judge("demo", {"accuracy": 0.8}, HERE, tmp_path)
    (high,) = judge("demo", {"accuracy": 1.0}, HERE, tmp_path)
    (nan,) = judge("demo", {"accuracy": math.nan}, HERE, tmp_path)
    (unknown,) = judge("demo", {"entropy": 0.1}, HERE, tmp_path)
    assert [each.fails for each in (low, high, nan, unknown)] == [True, False, True, False]
    assert low.sentence.startswith(
        "demo: held-out accuracy at the end is 0.8, outside of 0.84 … inf (5 recorded runs)"
    )
    assert unknown.word == "not judged"


@pytest.mark.parametrize("arm", gate.ARMS)
def test_the_recorded_runs_of_the_history_are_inside_their_own_bands(arm: str) -> None:
    history = read(arm)
    assert len({line.seed for line in history}) == len(history) > 0
    for line in history:
        assert set(line.figures) <= set(RULES)
        verdicts = judge(arm, line.figures, line.machine)
        assert [each.sentence for each in verdicts if each.fails] == []


def _outside(figures: dict[str, float]) -> set[str]:
    recorded = read("rloo")[0].machine
    return {verdict.name for verdict in judge("rloo", figures, recorded, HISTORY) if verdict.fails}


@pytest.mark.integration
@pytest.mark.slow
def test_a_wrong_sign_of_the_advantages_fails(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compute_advantages

    def wrong(*arguments: Any) -> Any:
        advantages, returns = right(*arguments)
        return [-each for each in advantages], returns

    monkeypatch.setattr("trainer.policy.learn.compute_advantages", wrong)
    outside = _outside(gate.measure({**gate.ARMS["rloo"], "model.name": base_model}, seed=0))
    assert {"accuracy", "reward"} <= outside


@pytest.mark.integration
@pytest.mark.slow
def test_a_drift_of_logprobs_fails(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning hides it: only |Δ logprob| shows a hundredth of a nat."""
    right = rollout.completion_from_answer

    @functools.wraps(right)
    def drifted(*arguments: Any, **options: Any) -> Any:
        completion = right(*arguments, **options)
        completion.logprobs = completion.logprobs - 0.01
        return completion

    monkeypatch.setattr(rollout, "completion_from_answer", drifted)
    outside = _outside(gate.measure({**gate.ARMS["rloo"], "model.name": base_model}, seed=0))
    assert "delta_logprob" in outside


@pytest.mark.integration
@pytest.mark.slow
def test_an_update_that_sleeps_a_fifth_of_a_step_fails(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        **gate.ARMS["rloo"],
        "model.name": base_model,
        "trainer.max_steps": 8,
        "evaluation.samples": 16,
    }
    clean = gate.measure(settings, seed=0)
    (line,) = lines("update", [clean["update"]])
    for _ in range(5):
        append("rloo", dataclasses.replace(line, figures=clean), tmp_path)

    right = Policy.update

    def slower(*arguments: Any) -> Any:
        unit = gate.reference()
        result = right(*arguments)
        time.sleep(0.2 * clean["cpu"] * unit)
        return result

    monkeypatch.setattr(Policy, "update", slower)
    slow = gate.measure(settings, seed=0)
    outside = {verdict.name for verdict in judge("rloo", slow, HERE, tmp_path) if verdict.fails}
    assert "update" in outside
    assert not outside & {"accuracy", "reward", "loss", "grad_norm", "delta_logprob", "dropped"}
