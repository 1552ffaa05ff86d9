"""A small job group, run by the real runner in separate processes."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.paths import ROOT
from tests.support.processes.waits import LIMIT_S, until


class LocalRun:
    """Runs `rlhf local` in its own folder; every process carries a mark in its
    environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, folder / "logs"
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        text: str,
        *arguments: str,
        stdout: int = subprocess.PIPE,
        open_files: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts the runner on this YAML, with this soft limit of open files if given."""
        (self.folder / "group.yaml").write_text(text)
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "RUN_MARK": self.mark,
            "FOLDER": str(self.folder),
        }
        command = [
            sys.executable,
            "-m",
            "jobgroup.local",
            "group.yaml",
            "--log-dir",
            "logs",
            *arguments,
        ]
        if open_files is not None:
            # A shell sets it: this process may itself hold more files than the limit.
            command = ["bash", "-c", 'ulimit -Sn "$0" && exec "$@"', str(open_files), *command]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return self.process

    def finish(self) -> tuple[int, str, str]:
        """Waits for the runner's end and returns (exit status, stdout, stderr)."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, (out or b"").decode(), err.decode()

    def run(self, text: str, *arguments: str) -> tuple[int, str, str]:
        """Starts the runner and waits for its end."""
        self.start(text, *arguments)
        return self.finish()

    def log(self, node: str) -> str:
        """Returns the log of a node; empty if there is none yet."""
        path = self.logs / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def _nodes(self) -> list[str]:
        return sorted(path.stem for path in self.logs.glob("*.log"))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds; fails with all logs, also when the runner has ended in
        vain.
        """
        process = self.process
        running = [process] if process is not None and process.poll() is None else []
        until(condition, lambda: "\n".join(map(self.log, self._nodes())), *running)

    def marked(self) -> list[psutil.Process]:
        """Returns the live processes of this run, the runner included."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get("RUN_MARK") == self.mark
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found
