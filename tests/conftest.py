"""Fixtures shared by all tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The cached tiny base model (`make test` makes it first); made here when it is not there."""
    path = ROOT / ".cache" / "tiny-base"
    if not (path / "config.json").exists():
        subprocess.run([sys.executable, "-m", "trainer.tiny_model", str(path)], cwd=ROOT, check=True)
    return path
