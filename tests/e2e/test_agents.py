"""The environment-server is killed during a run: its episodes are played again, and none is scored
as zero."""

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes.killed_task import run_with_kill
from tests.support.processes.processes import marked
from trainer.observe.run_dir import read_lines

STEPS = 8
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_run_outlives_its_environment_server(base_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "BATCH_SIZE": "4",
        "MAX_STEPS": str(STEPS),
        "RUN_DIR": str(run_dir),
        "STATE_DIR": str(tmp_path / "state"),
        "RLHF_ENVIRONMENT__NAME": "python:tests.support.environments.own_environments:Insists",
        "RLHF_SAMPLING__GROUP_SIZE": "4",
        "RLHF_EVALUATION__SAMPLES": "4",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    text, mark = run_with_kill(
        "jobgroup/rlhf-math-tools-jobgroup.yaml",
        settings,
        tmp_path,
        module="services.environment",
        after_step=2,
    )
    assert "restart 1 of environment-server" in text
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["update"]["trained_tokens"] > 0 for line in lines)
    assert max(line["update"]["delta_logprob_current"] for line in lines) < 1e-6
    assert lines[-1]["dropped"].get("episode", 0) == 0, (
        "an episode that was lost is played again under the same request"
    )
    assert marked(mark) == []
