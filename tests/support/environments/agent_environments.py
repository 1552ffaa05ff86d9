"""Virtual environments with packages that this project does not depend on, such as agent
frameworks."""

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def python_of(name: str) -> str:
    """Returns the interpreter of `.venv-NAME`, or of NAME in $AGENT_VENVS; skips the test if there
    is none."""
    folder = (
        Path(os.environ["AGENT_VENVS"]) / name
        if "AGENT_VENVS" in os.environ
        else ROOT / f".venv-{name}"
    )
    python = folder / "bin" / "python"
    if not python.exists():
        made = f"python -m venv .venv-{name} && .venv-{name}/bin/pip install -r tests/support/environments/{name}-requirements.txt"
        pytest.skip(f"there is no {python}: make it with `{made}`")
    return str(python)
