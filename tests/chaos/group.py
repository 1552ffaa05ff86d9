"""The local job group for chaos runs: short limits, unlimited restarts, everything in one
folder."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.targets import Process, processes, start_of
from trainer.observe.run_dir import read_lines

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
TOOLS_YAML = YAML.with_name("rlhf-math-tools-jobgroup.yaml")
_RESTART = re.compile(r"restart \d+ of (\S+) \(at most")


@dataclass
class Group:
    """A job group, running or ended.

    Args:
        folder: an empty folder, which receives `run`, `state`, `logs`, `output.txt` and the YAML.
        settings: the environment of every task.
    """

    folder: Path
    settings: Mapping[str, str]
    mark: str = field(default_factory=lambda: f"chaos-{uuid.uuid4()}")
    process: subprocess.Popen[bytes] | None = None
    _met: set[tuple[int, int]] = field(default_factory=set)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def restarts(self) -> Counter[str]:
        """Counts the local runner's restarts of every task."""
        return Counter(_RESTART.findall(self.output()))

    def processes(self) -> list[Process]:
        """Returns all live processes, the runner included."""
        found = processes(self.mark)
        self._met.update((process.pid, process.started) for process in found)
        return found

    def left(self) -> list[str]:
        """Describes the live processes of this run, including known ones that no longer show the
        mark."""
        found = {
            (process.pid, process.started): " ".join(process.argv) for process in self.processes()
        }
        for pid, started in self._met - set(found):
            if start_of(pid) == started:
                found[pid, started] = "seen before"
        return [f"{pid} {text}" for (pid, _), text in found.items()]

    def step(self) -> int:
        """Returns the last recorded step."""
        lines = read_lines(self.run_dir / "metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    @contextmanager
    def running(self) -> Iterator["Group"]:
        """Runs the group inside the context; ends it on exit if it still runs."""
        environment = {**os.environ, "CHAOS_MARK": self.mark, "PYTHONPATH": str(ROOT)}
        with (self.folder / "output.txt").open("wb") as log:
            self.process = subprocess.Popen(
                self._command(), cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait()

    def _command(self) -> list[str]:
        yaml = self.folder / "jobgroup.yaml"
        # Chaos kills more often than operators would tolerate, so the number of restarts is
        # unlimited.
        episodes = "RLHF_ENVIRONMENT__NAME" in self.settings
        yaml.write_text(
            (TOOLS_YAML if episodes else YAML)
            .read_text()
            .replace("max_restarts_on_errors: 3", "max_restarts_on_errors: 1000")
        )
        command = [
            sys.executable,
            "-m",
            "jobgroup.local",
            str(yaml),
            "--log-dir",
            str(self.folder / "logs"),
        ]
        if episodes:
            command += ["--num-nodes", "environment-server=2"]
        settings = {
            "RUN_DIR": str(self.run_dir),
            "STATE_DIR": str(self.state_dir),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        settings |= self.settings
        for name, value in settings.items():
            command += ["--env", f"{name}={value}"]
        return command


def wait_gone(group: Group, limit_s: float = 10.0) -> list[str]:
    """Waits for the processes of an ended group and describes those still alive after the limit."""
    limit = time.monotonic() + limit_s
    while (left := group.left()) and time.monotonic() < limit:
        time.sleep(0.1)
    return left
