"""What the tests of the trainer share."""

from pathlib import Path

import pytest

from common.config import Config
from tests.support.small_run import small_run


@pytest.fixture
def config(policy_dir: Path, tmp_path: Path) -> Config:
    """Settings of a small run."""
    return small_run(policy_dir, tmp_path)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the picture at the end of a run, which takes longer than a short run itself."""
    monkeypatch.setattr("trainer.observe.plots.plot_curves", lambda *_: None)
