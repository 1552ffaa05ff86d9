"""Shared code of the journeys: each follows one person through the product and times every part."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.processes.ports import free_port

LIMIT_S = 400


class Journey:
    """A journey in its own folder. `pytest -s` shows the seconds of each part."""

    def __init__(self, who: str, folder: Path) -> None:
        self.who, self.folder = who, folder
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        (folder / ".venv").symlink_to(
            sys.prefix
        )  # commands in the docs begin with .venv/bin/python

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Prints the duration of a part."""
        start = time.monotonic()
        yield
        print(f"{self.who}: {name}: {time.monotonic() - start:.1f} s", flush=True)

    def run(self, command: str, cwd: Path | None = None) -> str:
        """Runs a shell command, which must succeed, and returns its output."""
        words, place = ["bash", "-ec", command], cwd or self.folder
        done = subprocess.run(
            words, cwd=place, env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    @contextmanager
    def dashboard(self, *runs: Path) -> Iterator[str]:
        """Runs `rlhf dashboard` for these directories; yields its address."""
        words = [
            sys.executable,
            "-m",
            "trainer.dashboard",
            *map(str, runs),
            "--port",
            str(free_port()),
        ]
        with subprocess.Popen(
            words, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split()[1]
            finally:
                process.terminate()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns the language and the text of every code block on a page of the docs."""
    return re.findall(
        r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
