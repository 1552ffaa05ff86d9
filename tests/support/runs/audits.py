"""Small runs with an audit record, and their re-execution by the command."""

import os
import subprocess
import sys
from pathlib import Path

from common.settings.config import Config, load
from tests.support.paths import ROOT
from tests.support.processes.waits import LIMIT_S


def audited(model: Path, run_dir: Path, *more: str) -> Config:
    """Returns the settings of a run of four small steps on the built-in task, with an audit."""
    words = [
        *("--config", str(ROOT / "jobgroup/configs/tiny-cpu.yaml")),
        *("--model.name", str(model)),
        *("--trainer.run_dir", str(run_dir), "--state_dir", str(run_dir / "state")),
        *("--trainer.batch_size", "4", "--sampling.group_size", "4"),
        *("--trainer.max_steps", "4", "--checkpoint.every", "2"),
        *("--evaluation.samples", "0", "--optimizer.warmup_steps", "0"),
        *("--reward.workers", "1", "--trainer.audit", "true"),
    ]
    return load([*words, *more], {})


def reexecuted(run_dir: Path, step: int, *more: str) -> tuple[int, str]:
    """Re-executes a step by `rlhf audit` and returns its exit status and what it printed."""
    return command(str(run_dir), "--step", str(step), *more)


def command(*words: str) -> tuple[int, str]:
    """Runs `rlhf audit` and returns its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer.audit", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stderr + done.stdout
