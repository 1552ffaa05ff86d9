"""Small job groups run by the real runner in processes of their own."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60


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
        """Waits until something has happened; fails after a minute."""
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


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[[str], LocalRun]]:
    """Makes runs, each in its folder; what a failed test leaves behind is killed."""
    runs: list[LocalRun] = []

    def make(name: str) -> LocalRun:
        folder = tmp_path / name
        folder.mkdir()
        runs.append(LocalRun(folder))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.marked():
            process.send_signal(signal.SIGKILL)
        if run.process is not None:
            run.process.communicate()


@pytest.fixture
def local(make_run: Callable[[str], LocalRun]) -> LocalRun:
    """One run."""
    return make_run("run")
