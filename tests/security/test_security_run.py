"""The whole job group on this machine with a token, certificates and other secrets: it trains, and leaves none behind."""

import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.certificates import Certificates
from tests.support.paths import ROOT
from trainer.observe.run_dir import read_lines

pytestmark = [
    pytest.mark.process,
]
STEPS = 2


@dataclass
class Run:
    """A run that has ended, and the values that nobody may find in what it left."""

    directory: Path
    status: int
    output: str
    secrets: dict[str, str]


@pytest.fixture(scope="module")
def run(base_model: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("secure")
    values = {"API_TOKEN": secrets.token_hex(32), "HF_TOKEN": f"hf_{secrets.token_hex(16)}"}
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "NUM_EPOCHS": "",
        "BATCH_SIZE": "4",
        "MAX_STEPS": str(STEPS),
        "RUN_DIR": str(directory / "run"),
        "STATE_DIR": str(directory / "state"),
        "RLHF_SAMPLING__GROUP_SIZE": "4",
        "RLHF_TRAINER__EVAL_SAMPLES": "4",
        "RLHF_TRAINER__EVAL_PASS_SAMPLES": "0",
        "OMP_NUM_THREADS": "1",
        **certificates.env(),
    }
    command = [sys.executable, "-m", "jobgroup.local", "jobgroup/rlhf-math-jobgroup.yaml", "--log-dir", str(directory / "logs")]
    command += ["--secret", "API_TOKEN", "--secret", "HF_TOKEN"]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **values}, capture_output=True, text=True, timeout=800, check=False
    )
    return Run(directory, done.returncode, done.stdout + done.stderr, values)


def test_it_trains_with_token_and_certificates(run: Run) -> None:
    assert run.status == 0, run.output[-8000:]
    metrics = read_lines(run.directory / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["dropped"] == {} for line in metrics)
    assert "listens on https://127." in run.output
    assert "http://127." not in run.output


def test_no_secret_is_in_anything_that_a_run_leaves_or_says(run: Run) -> None:
    files = [path for path in run.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in files}
    assert {
        "config.json",
        "metrics.jsonl",
        "samples.jsonl",
        "rollout-server-0.engine.log",
        "rollout-server-0.router.log",
    } <= names
    for name, value in run.secrets.items():
        assert value not in run.output, name
        assert [path for path in files if value.encode() in path.read_bytes()] == [], name


def test_everything_listens_on_this_machine_alone(run: Run) -> None:
    """As every process says it; torchrun's own rendezvous is the exception (SECURITY.md)."""
    said = [line for line in run.output.splitlines() if " listens on " in line]
    assert len(said) >= 5, run.output[-3000:]
    assert all("listens on https://127." in line for line in said)
    assert "anyone who reaches" not in run.output
