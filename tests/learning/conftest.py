"""Shared fixtures of the tests of `learning`."""

from pathlib import Path

import pytest

from common.settings.config import Config
from tests.support.runs.small_run import small_run


@pytest.fixture
def config(policy_dir: Path, tmp_path: Path) -> Config:
    """The settings of a small run."""
    return small_run(policy_dir, tmp_path)
