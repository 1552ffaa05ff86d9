"""A whole job group of which a process is killed in the middle of the run."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT
from tests.support.processes.processes import marked
from tests.support.processes.waits import LIMIT_S, until
from trainer.observe.run_dir import read_lines


class KilledRun(NamedTuple):
    """What a run left behind."""

    text: str
    """Output of the runner."""
    mark: str
    """In the environment of every process of the run."""


def run_with_kill(
    yaml: str, settings: Mapping[str, str], folder: Path, *, module: str, after_step: int
) -> KilledRun:
    """Runs a job group to its end, and kills the process of `module` after a step.

    `settings` are its variables, with RUN_DIR among them; logs are in `folder`.
    """
    mark = f"e2e-{uuid.uuid4()}"
    output = folder / "output.txt"
    command = [sys.executable, "-m", "jobgroup.local", yaml, "--log-dir", str(folder / "logs")]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    environment = {**os.environ, "E2E_MARK": mark}
    metrics = Path(settings["RUN_DIR"]) / "metrics.jsonl"
    with (
        output.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as group,
    ):
        until(lambda: len(read_lines(metrics)) >= after_step, output, group)
        os.kill(min(marked(mark, f"-m {module}")), signal.SIGKILL)
        status = group.wait(timeout=LIMIT_S)
    text = output.read_text()
    assert status == 0, text[-6000:]
    return KilledRun(text, mark)
