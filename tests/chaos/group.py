"""The local job group for chaos runs: short limits, unlimited restarts, everything in one
folder."""

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.settings.config import Config
from tests.chaos.targets import Process, processes, start_of
from trainer.observe.run_dir import read_lines

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
TOOLS_YAML = YAML.with_name("rlhf-math-tools-jobgroup.yaml")
_RESTART = re.compile(r"restart \d+ of (\S+) \(at most")
_FOLLOW_S = 0.05


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
    seen: list[list[dict[str, Any]]] = field(default_factory=list)
    """The groups of every recorded step, in the form of `groups.jsonl`."""
    step_times: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since 1970, step) of every recorded step."""
    process: subprocess.Popen[bytes] | None = None
    _known: set[tuple[int, str]] = field(default_factory=set)
    _timed: set[float] = field(default_factory=set)
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
        """Returns the last completed step."""
        return self.step_times[-1][1] if self.step_times else 0

    def config(self) -> Config:
        """Returns the run's settings once it has begun."""
        return Config.model_validate_json((self.run_dir / "config.json").read_text())

    @contextmanager
    def running(self) -> Iterator["Group"]:
        """Runs the group inside the context; ends it on exit if it still runs."""
        environment = {**os.environ, "CHAOS_MARK": self.mark, "PYTHONPATH": str(ROOT)}
        done = threading.Event()
        follower = threading.Thread(target=self._follow, args=(done,), daemon=True)
        with (self.folder / "output.txt").open("wb") as log:
            self.process = subprocess.Popen(
                self._command(), cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        follower.start()
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait()
            done.set()
            follower.join()

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

    def _follow(self, done: threading.Event) -> None:
        last = False
        while not last:
            last = done.wait(_FOLLOW_S)
            for line in read_lines(self.run_dir / "groups.jsonl"):
                key = (line["step"], line["groups"][0]["id"])
                if key not in self._known:
                    self._known.add(key)
                    self.seen.append(line["groups"])
            for line in read_lines(self.run_dir / "metrics.jsonl"):
                if line["time"] not in self._timed:
                    self._timed.add(line["time"])
                    self.step_times.append((line["time"], line["step"]))


def wait_gone(group: Group, limit_s: float = 10.0) -> list[str]:
    """Waits for the processes of an ended group and describes those still alive after the limit."""
    limit = time.monotonic() + limit_s
    while (left := group.left()) and time.monotonic() < limit:
        time.sleep(0.1)
    return left
