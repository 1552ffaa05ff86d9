"""Runs under simulated faults keep the invariants of `world`; the same seed is the same run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.run import simulate
from tests.support.paths import ROOT

_PART = 25


def simulate_all(first: int, count: int, directory: Path) -> None:
    for seed in range(first, first + count):
        simulate(seed, directory / str(seed))


@pytest.mark.parametrize("first", range(0, 100, _PART))
def test_runs_with_faults_train_on_every_prompt_once(first: int, tmp_path: Path) -> None:
    simulate_all(first, _PART, tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("first", range(100, 600, 100))
def test_more_runs_with_faults(first: int, tmp_path: Path) -> None:
    simulate_all(first, 100, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(600, 10_000, 100))
def test_many_runs_with_faults(first: int, tmp_path: Path) -> None:
    simulate_all(first, 100, tmp_path)


def test_a_seed_tells_the_same_story_twice(tmp_path: Path) -> None:
    stories = [simulate(11, tmp_path / name).story for name in ("once", "again")]
    assert stories[0].lines == stories[1].lines
    assert stories[0].faults


@pytest.mark.slow
def test_the_planted_bugs_are_found() -> None:
    command = [sys.executable, "-m", "tests.simulation.planted"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
