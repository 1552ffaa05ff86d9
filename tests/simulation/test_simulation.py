"""Runs under simulated faults keep the invariants of `world`; the same seed is the same run."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.simulation.planted import BUGS
from tests.simulation.run import SCENES, in_memory, simulate
from tests.simulation.scene import Scene, Violation
from tests.support.paths import ROOT

_PART = 25
FOUND = (2079, 2715, 3443, 5405, 6540, 7565, 8063, 8145, 8789, 701_692)
"""Seeds that found faults of the product: a data-server that forgot which runs had ended, a late
copy of a group that was counted as stale, a request without groups that a full disk kept open, a
lost volume with groups that the trainer held, of which it accused another client, and one whose
successor took a late copy of a call for a new one."""
FULL_WHILE_IT_STARTS = (955, 1148)
"""Seeds with which a service starts on a new volume of a full disk."""

LISTED_WHILE_IT_STARTS = (97,)
"""Seeds with which a node comes back, cut off from the trainer, while the router lists its engine."""

SET_BACK = (41, 40_023, 120_001)
"""Seeds with which a late copy of a call makes an engine load older weights again; in the last one
another copy brings the newest ones back."""

NOT_HEARD = (70_150,)
"""Seeds with which an agent is told that the trainer goes on without it, and does not get the answer."""

FORGOTTEN = (10_021, 20_223)
"""Seeds with which a replay-buffer that lost its volume does not know that the run of a trainer which
wakes up has ended: it took that run's groups, and was full of them; each of two trainers got the
groups of the other one, and ended."""

LATE_CLAIM = (70_140,)
"""Seeds with which the claim of a run arrives at the data-server when a later run has begun at both
stores."""


def simulate_all(seeds: Iterable[int], scene: str = "groups") -> None:
    for seed in seeds:
        with in_memory() as directory:
            simulate(seed, Path(directory), scene)


@pytest.mark.parametrize("first", range(0, 300, _PART))
def test_runs_with_faults_train_on_every_prompt_once(first: int) -> None:
    simulate_all(range(first, first + _PART))


@pytest.mark.integration
@pytest.mark.parametrize("first", range(300, 10_000, 100))
def test_ten_thousand_runs_with_faults(first: int) -> None:
    simulate_all(range(first, first + 100))


@pytest.mark.parametrize("scene", SCENES)
def test_a_run_without_an_end_fails_its_own_test(
    scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Scene.limit
    monkeypatch.setattr(Scene, "limit", lambda run, _: limit(run, 2.0))
    # A KeyboardInterrupt would end the worker of all tests.
    with pytest.raises(Violation, match="has not ended after 2 s"):
        simulate_all([11], scene)


def test_what_seeds_have_found_stays_mended() -> None:
    simulate_all(FOUND)


def test_a_service_that_cannot_start_yet_is_started_again() -> None:
    simulate_all(FULL_WHILE_IT_STARTS)


def test_no_engine_with_old_weights_gets_requests() -> None:
    simulate_all(range(16), "fleet")


def test_an_engine_that_the_router_still_lists_does_not_start() -> None:
    simulate_all(LISTED_WHILE_IT_STARTS, "fleet")


def test_an_engine_that_a_late_call_makes_older_leaves_the_router_and_comes_back() -> None:
    simulate_all(SET_BACK, "fleet")


def test_an_agent_that_has_not_heard_that_it_is_excluded_lists_no_old_weights() -> None:
    simulate_all(NOT_HEARD, "fleet")


@pytest.mark.integration
@pytest.mark.parametrize("first", range(16, 216, 100))
def test_no_engine_with_old_weights_gets_requests_in_more_runs(first: int) -> None:
    simulate_all(range(first, first + 100), "fleet")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(216, 1_016, 100))
def test_no_engine_with_old_weights_gets_requests_in_a_thousand_runs(first: int) -> None:
    simulate_all(range(first, first + 100), "fleet")


def test_an_episode_is_what_its_engines_and_its_agent_made_it() -> None:
    simulate_all(range(12), "episodes")


def test_a_trainer_that_was_taken_over_changes_nothing() -> None:
    simulate_all((*range(12), *FORGOTTEN, *LATE_CLAIM), "takeover")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("scene", "end"), [("episodes", 112), ("takeover", 112), ("takeover-episodes", 30)]
)
def test_episodes_and_takeovers_in_more_runs(scene: str, end: int) -> None:
    simulate_all(range(12, end), scene)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(112, 1_012, 100))
def test_a_thousand_runs_with_episodes(first: int) -> None:
    simulate_all(range(first, first + 100), "episodes")


@pytest.mark.parametrize("scene", SCENES)
def test_a_seed_tells_the_same_story_twice(tmp_path: Path, scene: str) -> None:
    stories = [simulate(11, tmp_path / name, scene).story for name in ("once", "again")]
    assert stories[0].lines == stories[1].lines
    assert stories[0].faults


def test_the_planted_bugs_are_slips_in_the_source_as_it_is() -> None:
    for name, bug in BUGS.items():
        assert (ROOT / bug.file).read_text().count(bug.right) == 1, name


@pytest.mark.slow
def test_the_planted_bugs_are_found() -> None:
    command = [sys.executable, "-m", "tests.simulation.planted"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
