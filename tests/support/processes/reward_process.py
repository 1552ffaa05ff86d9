"""A reward-server as a real process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT


@contextmanager
def reward_server(port: int, state_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a real reward-server; yields its process at once."""
    environment = os.environ | {
        "RLHF_REWARD__PORT": str(port),
        "RLHF_REWARD__WORKERS": "1",
        "STATE_DIR": str(state_dir),
    }
    command = [sys.executable, "-m", "services.reward"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)  # pytest shows its log
    try:
        yield process
    finally:
        process.kill()
        process.wait()
