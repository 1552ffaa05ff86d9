"""Runs under simulated faults keep the invariants of `world`; the same seed is the same run."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.simulation.world import Violation, simulate
from trainer.rollouts.prompt_cursor import PromptCursor, PromptProgress

_SEEDS = 10


def simulate_all(seeds: Iterable[int], directory: Path) -> None:
    for seed in seeds:
        simulate(seed, directory / str(seed))


@pytest.mark.parametrize("first", range(0, 40, _SEEDS))
def test_runs_with_faults_train_on_every_prompt_once(first: int, tmp_path: Path) -> None:
    simulate_all(range(first, first + _SEEDS), tmp_path)


def test_a_seed_tells_the_same_story_twice(tmp_path: Path) -> None:
    stories = [simulate(11, tmp_path / name).story for name in ("once", "again")]
    assert stories[0].lines == stories[1].lines
    assert stories[0].faults


def test_a_cursor_that_forgets_what_was_trained_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: checkpoints with the progress of a new run."""
    monkeypatch.setattr(PromptCursor, "progress", PromptProgress())
    with pytest.raises(Violation, match="trained on twice"):
        simulate_all(range(200), tmp_path)
