"""Runs of several ranks, killed and resumed ones, those with a critic and those of episodes are
re-executed by the command.
"""

import json
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import msgpack
import numpy as np
import pytest

from common.settings.config import load
from examples.tool_calculator.base import build
from tests.support.paths import ROOT
from tests.support.processes.ranks import run_ranks
from tests.support.runs.audits import audited, command, reexecuted
from tests.support.runs.in_process import quiet
from trainer import OnlineRLTrainer, TrainerConfig
from trainer.start.in_process import train_in_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NOTHING = "nothing differs from what the run recorded"


def assert_equal(run_dir: Path, step: int) -> str:
    """Re-executes a step, of which nothing may differ; returns what was printed."""
    status, printed = reexecuted(run_dir, step)
    assert status == 0, printed
    assert printed.splitlines()[-1] == NOTHING, printed
    return printed


def test_a_run_of_two_ranks_that_share_a_model_is_certified(
    base_model: Path, tmp_path: Path
) -> None:
    """Each rank has half of the weights, of whose shares the checksums are."""
    run_dir = tmp_path / "run"
    words = [str(run_dir), str(base_model), "0", "--parallel.shard_size=2"]
    run_ranks(2, "audited_run", *words)
    path = str(tmp_path / "certificate.json")
    status, printed = command(str(run_dir), "--certify", path, "--seed", "a", "--count", "1")
    assert status == 0, printed
    assert "on 2 ranks" in printed
    assert printed.count(NOTHING) == 2, "the drawn step, and the checkpoint"
    assert "the weights in step_000004" in printed


def test_a_run_that_was_killed_and_resumed(base_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="-9"):
        run_ranks(1, "audited_run", str(run_dir), str(base_model), "3")
    run_ranks(1, "audited_run", str(run_dir), str(base_model))

    lines = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4], "the lost third was made again"
    assert len({line["run_id"] for line in steps}) == 2
    for step in (2, 3, 4):
        assert_equal(run_dir, step)


def test_a_run_with_a_critic_a_reference_and_truncated_sampling(
    base_model: Path, tmp_path: Path
) -> None:
    more = ["--algorithm.name=ppo", "--algorithm.kl_coef=0.01", "--sampling.top_p=0.9"]
    config = audited(base_model, tmp_path / "run", *more)
    train_in_process(config, quiet())
    printed = assert_equal(tmp_path / "run", 4)
    assert "the reference's log-probabilities, the critic's values" in printed


def test_a_run_of_episodes_and_a_tool_that_said_something_else(tmp_path: Path) -> None:
    build(tmp_path, console=quiet(), steps=80, batch=8)
    run_dir = tmp_path / "run"
    words = [
        *("--config", str(ROOT / "examples/tool_calculator/grpo.yaml")),
        *("--model.name", str(tmp_path / "base"), "--data.source", str(tmp_path / "problems")),
        *("--trainer.run_dir", str(run_dir), "--state_dir", str(run_dir / "state")),
        *("--trainer.batch_size", "4", "--sampling.group_size", "4", "--trainer.max_steps", "2"),
        *("--evaluation.samples", "4", "--trainer.audit", "true"),
    ]
    train_in_process(load(words, {}), quiet())
    printed = assert_equal(run_dir, 2)
    assert "16 episodes of python:examples.tool_calculator.calculator:Calculator" in printed

    path = str(tmp_path / "certificate.json")
    words = [str(run_dir), "--certify", path, "--seed", "a", "--recorded-tools"]
    status, printed = command(*words)
    assert status == 0, printed
    status, printed = command(str(run_dir / "checkpoints/step_000002"), "--check", path)
    assert status == 0, printed
    assert "not compared: step 2, episodes" in printed

    change_a_result(run_dir / "groups/step_000002.zip")
    status, printed = reexecuted(run_dir, 2)
    assert status == 1
    assert printed.splitlines()[-1] == "the first stage that differs: episodes"
    # Without its tools, what the model read after the changed word tells.
    assert command(*words)[0] == 1


def change_a_result(path: Path) -> None:
    """Changes a token that the environment, not the model, said."""
    with ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    for name in sorted(content):
        document = msgpack.unpackb(content[name])
        for completion in document["completions"]:
            mask = np.frombuffer(completion["mask"], "<i4")
            if (mask == 0).any():
                tokens = np.frombuffer(completion["token_ids"], "<i4").copy()
                tokens[int(np.flatnonzero(mask == 0)[0])] ^= 1
                completion["token_ids"] = tokens.tobytes()
                content[name] = msgpack.packb(document)
                with ZipFile(path, "w", ZIP_DEFLATED) as file:
                    for each, body in content.items():
                        file.writestr(each, body)
                return
    raise AssertionError("no tool was called: train the model for longer")


def test_a_script_with_reward_functions_of_its_own(base_model: Path, tmp_path: Path) -> None:
    def right(completions: list[str], ground_truth: list[str]) -> list[float]:
        return [
            float(text.strip().endswith(truth))
            for text, truth in zip(completions, ground_truth, strict=True)
        ]

    def brief(completions: list[str]) -> list[float]:
        return [-0.01 * len(text) for text in completions]

    problem = "Ann has 5 coins, loses 2 and finds 9 more. How many coins now?"
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        output_dir=tmp_path / "run",
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=2,
        max_new_tokens=16,
        reward_weights=[1.0, 0.5],
        verbose=False,
        settings={"trainer.audit": True},
    )
    rows = [{"prompt": problem, "ground_truth": "12"}] * 4
    OnlineRLTrainer(config, [right, brief], rows).train()
    status, printed = reexecuted(tmp_path / "run", 2)
    assert status == 0, printed
    last = printed.splitlines()[-1]
    assert last == f"{NOTHING}, except what was not compared (rewards)"
