"""Fixtures shared by all tests."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# The same examples on every run; `make fuzz` looks for new ones.
settings.register_profile("repeatable", derandomize="FUZZ_SECONDS" not in os.environ, deadline=None)
settings.load_profile("repeatable")
# torch writes hundreds of lines of DEBUG for every checkpoint, which would hide what failed.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The cached tiny base model (`make test` makes it first); made here when it is not there."""
    path = ROOT / ".cache" / "tiny-base"
    if not (path / "config.json").exists():
        subprocess.run([sys.executable, "-m", "trainer.tiny_model", str(path)], cwd=ROOT, check=True)
    return path
