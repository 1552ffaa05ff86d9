"""A small job group run by the real runner in processes of its own."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.paths import ROOT

LIMIT_S = 400


class LocalRun:
    """`python -m jobgroup.local` in a folder of its own; every process of it carries a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, folder / "logs"
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, text: str, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Starts the runner on this YAML."""
        (self.folder / "group.yaml").write_text(text)
        env = os.environ | {"PYTHONPATH": str(ROOT), "RUN_MARK": self.mark, "FOLDER": str(self.folder)}
        command = [sys.executable, "-m", "jobgroup.local", "group.yaml", "--log-dir", "logs", *arguments]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
        )
        return self.process

    def finish(self) -> tuple[int, str, str]:
        """(exit status, stdout, stderr) when the runner has ended."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, (out or b"").decode(), err.decode()

    def run(self, text: str, *arguments: str) -> tuple[int, str, str]:
        """Start and finish."""
        self.start(text, *arguments)
        return self.finish()

    def log(self, node: str) -> str:
        """The log file of a node; empty when it is not there yet."""
        path = self.logs / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until something has happened; fails after five minutes."""
        limit = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit, "it did not happen"
            time.sleep(0.02)

    def marked(self) -> list[psutil.Process]:
        """The processes of this run that are alive, the runner included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RUN_MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found
