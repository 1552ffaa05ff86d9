"""Service processes of a benchmark."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def processes(commands: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Runs `python -m` with each of these commands inside the context; yields their process ids."""
    environment = {**os.environ, "LOG_LEVEL": "WARNING", "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=environment) for words in commands]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
