"""Processes of the real job group are killed: it goes on, from the newest checkpoint if necessary.

Each task has one node here; `test_critic` and the chaos tests have several.
"""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes.processes import marked
from tests.support.processes.waits import until
from trainer.observe.run_dir import read_lines

STEPS = 10
# A killed trainer, engine and grader each have quicker tests too.
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(
    "group_file", ["rlhf-math", pytest.param("rlhf-math-onegpu", marks=pytest.mark.slow)]
)
def test_killed_processes_cost_time_and_nothing_else(
    base_model: Path, tmp_path: Path, group_file: str
) -> None:
    run_dir, mark, output = tmp_path / "run", f"e2e-{uuid.uuid4()}", tmp_path / "output.txt"
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "BATCH_SIZE": "8",
        "MAX_STEPS": str(STEPS),
        "RUN_DIR": str(run_dir),
        "STATE_DIR": str(tmp_path / "state"),
        "RLHF_CHECKPOINT__EVERY": "4",
        "RLHF_EVALUATION__SAMPLES": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "jobgroup.local", f"jobgroup/{group_file}-jobgroup.yaml"]
    command += ["--log-dir", str(tmp_path / "logs")]
    command += ["--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    environment = {**os.environ, "E2E_MARK": mark}
    with (
        output.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as group,
    ):

        def kill(what: str, step: int, chosen: Callable[[list[int]], int] = min) -> None:
            """Runs kill -9 on one of the processes with `what` in their command line, after the
            given step."""
            until(
                lambda: len(read_lines(run_dir / "metrics.jsonl")) >= step and marked(mark, what),
                output,
                group,
            )
            os.kill(chosen(marked(mark, what)), signal.SIGKILL)

        kill("-m services.reward", 2)
        kill("-m services.engine", 3)
        kill("-u -m trainer", 6, max)
        status = group.wait(timeout=400)
    text = output.read_text()
    assert status == 0, text[-6000:]
    assert "restart 1 of reward-server" in text
    assert "restart 1 of ppo-trainer" in text
    assert "continuing after step 4" in text
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["staleness"] == 0 for line in lines)
    assert all(line["update"]["delta_logprob"] < 1e-3 for line in lines)
    assert marked(mark) == []
