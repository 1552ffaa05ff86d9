"""The critic-server is killed during a run: the run goes on with the critic of the last
checkpoint."""

import json
from pathlib import Path

import pytest

from tests.support.processes.killed_task import run_with_kill
from tests.support.processes.processes import marked
from trainer.observe.run_dir import read_lines

STEPS, EVERY = 12, 4
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_run_never_goes_on_with_another_critic_than_it_trained(
    base_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    state_dir = tmp_path / "state"
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-ppo-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "BATCH_SIZE": "8",
        "MAX_STEPS": str(STEPS),
        "RUN_DIR": str(run_dir),
        "STATE_DIR": str(state_dir),
        "RLHF_CHECKPOINT__EVERY": str(EVERY),
        "RLHF_CHECKPOINT__KEEP": "1",
        "RLHF_EVALUATION__SAMPLES": "0",
        "OMP_NUM_THREADS": "1",
    }
    text, mark = run_with_kill(
        "jobgroup/rlhf-math-ppo-jobgroup.yaml",
        settings,
        tmp_path,
        module="services.critic",
        after_step=EVERY + 2,
    )
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
