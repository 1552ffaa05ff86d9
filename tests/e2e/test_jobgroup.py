"""The real job group on this machine: the unchanged YAML, two rollout nodes behind the real router,
two trainer ranks.

It runs once, with a token, certificates and other secrets, and behind a dead proxy; each test
checks one aspect of the result.
"""

import json
import os
import secrets
import sqlite3
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import ROOT
from tests.support.processes.certificates import make_certificates
from tests.support.processes.processes import marked
from trainer.observe.run_dir import read_lines

STEPS = 16
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
pytestmark = pytest.mark.integration


@dataclass
class Run:
    """What a finished run left behind."""

    directory: Path
    output: str
    status: int
    mark: str
    secrets: dict[str, str]
    """Values that must not appear in anything the run left."""

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.directory / f"{name}.jsonl")


@pytest.fixture(scope="module")
def run(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory, mark = tmp_path_factory.mktemp("e2e"), f"e2e-{uuid.uuid4()}"
    values = {"API_TOKEN": secrets.token_hex(32), "HF_TOKEN": f"hf_{secrets.token_hex(16)}"}
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "MAX_STEPS": str(STEPS),
        "RUN_DIR": str(directory / "run"),
        "STATE_DIR": str(directory / "state"),
        "RLHF_CHECKPOINT__EVERY": "8",
        "RLHF_EVALUATION__SAMPLES": "128",
        "RLHF_EVALUATION__PASS_SAMPLES": "16",
        "OMP_NUM_THREADS": "1",
        "LOG_FORMAT": "json",
        "LOG_LEVEL": "DEBUG",
        **make_certificates(tmp_path_factory.mktemp("tls")).env(),
    }
    command = [
        sys.executable,
        "-m",
        "jobgroup.local",
        "jobgroup/rlhf-math-jobgroup.yaml",
        "--log-dir",
        str(directory / "logs"),
    ]
    command += ["--secret", "API_TOKEN", "--secret", "HF_TOKEN"]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    proxies = dict.fromkeys(PROXIES, "http://127.0.0.1:9")
    environment = {**os.environ, "E2E_MARK": mark, **values, **proxies}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    return Run(directory / "run", result.stdout + result.stderr, result.returncode, mark, values)


def test_it_ends_well_and_leaves_no_process(run: Run) -> None:
    assert run.status == 0, run.output[-6000:]
    assert marked(run.mark) == []


def test_it_learns(run: Run) -> None:
    before, after = (run.lines("evaluations")[i] for i in (0, -1))
    assert (before["step"], after["step"]) == (0, STEPS)
    assert after["accuracy"] >= 0.6
    assert after["accuracy"] > before["accuracy"] + 0.15
    assert before["pass_at_k"] is not None
    assert after["pass_at_k"] is not None


def test_every_step_is_on_policy_and_every_prompt_is_trained_on_once(run: Run) -> None:
    metrics = run.lines("metrics")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["staleness"] == 0 for line in metrics)
    assert all(line["dropped"] == {} for line in metrics)
    assert all(line["update"]["delta_logprob"] < 1e-3 for line in metrics)
    assert all(abs(line["update"]["ratio"] - 1) < 1e-3 for line in metrics)
    with sqlite3.connect(run.directory.parent / "state" / "replay" / "replay.db") as db:
        states = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
    db.close()
    assert sum(states.values()) == 32 * STEPS
    assert len(states) == 1, "every group was acknowledged"
    trained = [group for line in run.lines("groups") for group in line["groups"]]
    assert sorted(group["position"] for group in trained) == list(range(32 * STEPS))
    assert all(
        group["versions"] == [line["step"] - 1] * 2
        for line in run.lines("groups")
        for group in line["groups"]
    )


def test_both_engines_generate_and_both_trainer_ranks_take_part(run: Run) -> None:
    logs = run.directory.parent / "logs"
    for node in ("rollout-server-0", "rollout-server-1"):
        lines = [json.loads(line) for line in (logs / f"{node}.log").read_text().splitlines()]
        assert any(
            (line["service"], line["message"], line.get("code"))
            == ("rollout-engine", "POST /generate", "served")
            for line in lines
        ), node
        assert node in run.output
    assert "starts: rank 1 of 2" in (logs / "ppo-trainer-1.log").read_text()


def test_every_component_logs_its_start_in_json(run: Run) -> None:
    names = {
        **{
            "data-server-0": "data-server",
            "rollout-server-0": "rollout-server",
            "rollout-server-1": "rollout-server",
        },
        **{"reward-server-0": "reward-server", "replay-buffer-0": "replay-buffer"},
    }
    for name, service in names.items():
        lines = [
            json.loads(line)
            for line in (run.directory.parent / "logs" / f"{name}.log").read_text().splitlines()
        ]
        own = [line["message"] for line in lines if line["service"] == service]
        assert any(
            message.startswith(f"{service} 0.1.0 listens on https://127.") for message in own
        ), name
    assert '"message": "ppo-trainer 0.1.0 starts' in run.output
    waits = {
        "generation_bound",
        "rollout_idle",
        "reward_bound",
        "replay_bound",
        "publish_bound",
        "nothing_active",
    }
    # These hints depend on the speed of the machine.
    assert {name for line in run.lines("metrics") for name in line["hints"]} <= waits


def test_one_id_tells_the_story_of_a_group_in_every_log(run: Run) -> None:
    logs = {
        path.name: path.read_text().splitlines()
        for path in (run.directory.parent / "state" / "logs").iterdir()
    }
    group = run.lines("groups")[10]["groups"][3]["id"]

    def found(identifier: str) -> set[str]:
        return {
            name
            for name, lines in logs.items()
            if any(f'"request": "{identifier}"' in line for line in lines)
        }

    trainer = [json.loads(line) for line in logs["ppo-trainer-rank0.log"]]
    calls = [
        line["request"]
        for line in trainer
        if line["message"].startswith("one call for ") and group in line["message"]
    ]
    everywhere = found(group).union(*map(found, calls))
    assert {"ppo-trainer-rank0.log", "reward-server.log", "replay-buffer.log"} <= everywhere
    assert any(name.endswith(".engine.log") for name in found(group))
    versions = [line["request"] for line in trainer if line.get("request", "").endswith("-v12")]
    assert {"rollout-server-0.log", "rollout-server-1.log"} <= found(versions[0])


def test_the_checkpoint_is_a_hugging_face_model(run: Run) -> None:
    newest = sorted((run.directory / "checkpoints").iterdir())[-1]
    assert newest.name == f"step_{STEPS:06d}"
    model = AutoModelForCausalLM.from_pretrained(newest)
    tokenizer = AutoTokenizer.from_pretrained(newest)
    chat = [
        {
            "role": "user",
            "content": "Ann has 4 bags with 5 pens each and 3 more. How many pens now?",
        }
    ]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "####" in tokenizer.decode(answer[0])


def test_the_run_directory_tells_the_whole_story(run: Run) -> None:
    config = json.loads((run.directory / "config.json").read_text())
    assert config["trainer"]["max_steps"] == STEPS
    assert config["sampling"]["group_size"] == 8
    samples = run.lines("samples")
    assert len(samples) == STEPS
    assert all(len(sample["completions"]) == 8 for sample in samples)
    for phrase in (
        "greedy accuracy",
        "pass@8",
        "before",
        "after",
        "checkpoint",
        "seconds of a step",
    ):
        assert phrase in run.output


def test_no_secret_is_in_the_files_or_output_of_a_run(run: Run) -> None:
    files = [
        path for path in run.directory.parent.rglob("*") if path.is_file() and not path.is_symlink()
    ]
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


def test_everything_listens_only_on_this_machine(run: Run) -> None:
    """As every process reports it; torchrun's own rendezvous is the exception (SECURITY.md)."""
    said = [line for line in run.output.splitlines() if " listens on " in line]
    assert "http://127." not in run.output
    assert len(said) >= 5, run.output[-3000:]
    assert all("listens on https://127." in line for line in said)
    assert "anyone who can reach" not in run.output
