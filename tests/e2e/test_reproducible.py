"""Two runs of the demo as a job group have the same weights after every step, while two busy
processes run beside one of them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from trainer.observe.run_dir import read_lines

STEPS = 8
BUSY = "while True: pass"
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def checksums(directory: Path, base_model: Path, staleness: int) -> list[str]:
    """Trains as `make demo` does, with two rollout and two trainer nodes; returns the checksum of the
    weights after every step."""
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "RUN_DIR": str(directory),
        "MAX_STEPS": str(STEPS),
        "RLHF_REPRODUCIBLE": "true",
        "RLHF_TRAINER__MAX_STALENESS": str(staleness),
        "RLHF_EVALUATION__EVERY": "2",
        "RLHF_EVALUATION__SAMPLES": "16",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "jobgroup.local", "jobgroup/rlhf-math-jobgroup.yaml"]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [line["weights_checksum"] for line in read_lines(directory / "metrics.jsonl")]


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_beside_busy_processes_has_the_weights_of_another(
    base_model: Path, tmp_path: Path, staleness: int
) -> None:
    alone = checksums(tmp_path / "alone", base_model, staleness)
    with busy(os.cpu_count() or 2):
        beside = checksums(tmp_path / "beside", base_model, staleness)
    assert beside == alone
    assert len(set(alone)) == STEPS
