"""The critic-server is killed during a run: the run goes on with the critic of the last
checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import marked
from trainer.observe.run_dir import read_lines

STEPS, EVERY = 12, 4
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_run_never_goes_on_with_another_critic_than_it_trained(
    base_model: Path, tmp_path: Path
) -> None:
    run_dir, state_dir, mark, output = (
        tmp_path / "run",
        tmp_path / "state",
        f"e2e-{uuid.uuid4()}",
        tmp_path / "output.txt",
    )
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-ppo-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "BATCH_SIZE": "8",
        "MAX_STEPS": str(STEPS),
        "RUN_DIR": str(run_dir),
        "STATE_DIR": str(state_dir),
        "RLHF_TRAINER__CHECKPOINT_EVERY": str(EVERY),
        "RLHF_TRAINER__KEEP_CHECKPOINTS": "1",
        "RLHF_TRAINER__EVAL_SAMPLES": "0",
        "OMP_NUM_THREADS": "1",
    }
    group_file = "jobgroup/rlhf-math-ppo-jobgroup.yaml"
    command = [
        sys.executable,
        "-m",
        "jobgroup.local",
        group_file,
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    environment = {**os.environ, "E2E_MARK": mark}
    with (
        output.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as group,
    ):
        limit = time.monotonic() + 400
        while len(read_lines(run_dir / "metrics.jsonl")) < EVERY + 2:
            assert group.poll() is None, output.read_text()[-4000:]
            assert time.monotonic() < limit, output.read_text()[-4000:]
            time.sleep(0.02)
        os.kill(min(marked(mark, "-m services.critic")), signal.SIGKILL)
        status = group.wait(timeout=400)
    text = output.read_text()
    assert status == 0, text[-6000:]
    assert "restart 1 of critic-server" in text
    assert (
        "the critic-server lost the critic of this run: the critic is not that of any run" in text
    )
    assert "restart 1 of ppo-trainer" in text
    assert f"continuing after step {EVERY}" in text
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[0]["critic"]["value_mean"] == 0, "a new critic expects nothing"
    assert all(line["critic"]["value_mean"] != 0 for line in lines[1:]), (
        "it was never a new one again"
    )
    [newest] = (run_dir / "checkpoints").iterdir()
    saved = json.loads((newest / "critic-server" / "saved.json").read_text())
    assert (newest.name, saved["step"]) == (f"step_{STEPS:06d}", STEPS)
    kept = sorted(path.name for path in (state_dir / "critic").iterdir())
    assert kept == [f"step_{step:06d}" for step in (STEPS - EVERY, STEPS)], (
        "one more than the trainer keeps"
    )
    assert marked(mark) == []
