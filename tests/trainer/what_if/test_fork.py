"""A fork begins with the state of the run after a step, uses the answers that stay valid, and learns
what the change makes of them.
"""

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.runs.audits import audited
from tests.support.runs.in_process import quiet
from trainer.observe.run_dir import read_lines
from trainer.start.in_process import train_in_process
from trainer.what_if.fork import main

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def parent(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproducible run of four steps, with a checkpoint after each second one."""
    run_dir = tmp_path_factory.mktemp("fork") / "run"
    config = audited(base_model, run_dir, "--reproducible=true", "--trainer.max_staleness=0")
    train_in_process(config, quiet())
    return run_dir


def weights(run_dir: Path) -> list[str]:
    return [line["weights_checksum"] for line in read_lines(run_dir / "metrics.jsonl")]


def test_a_fork_without_a_change_is_the_run_again(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 1, which has no checkpoint: the state is that of a recorded update."""
    fork = tmp_path / "fork"
    main([str(parent), "--step", "1", "--output", str(fork)])
    assert weights(fork) == weights(parent)
    said = json.loads((fork / "fork.json").read_text())
    assert set(said["recorded"].values()) == {2}, "only step 2 was sampled by version 1"
    assert (len(said["recorded"]), len(said["generated"])) == (4, 8)
    assert "held-out answers beside those of run 1" in capsys.readouterr().out


def test_another_reward_grades_the_recorded_answers(parent: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    functions = '[{"name": "length", "soft_chars": 1, "hard_chars": 30}]'
    words = ["--step", "2", "--set", f"reward.functions={functions}", "--max-steps", "3"]
    main([str(parent), *words, "--output", str(fork)])
    said = json.loads((fork / "fork.json").read_text())
    assert (len(said["recorded"]), said["generated"]) == (4, [])
    own = read_lines(fork / "samples.jsonl")[-1]["completions"]
    before = read_lines(parent / "samples.jsonl")[2]["completions"]
    assert [each["text"] for each in own] == [each["text"] for each in before]
    assert [each["reward"] for each in own] != [each["reward"] for each in before]
    assert weights(fork)[:2] == weights(parent)[:2]
    assert weights(fork)[2] != weights(parent)[2]


def test_what_changes_the_answers_is_generated_anew(parent: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    words = ["--step", "3", "--set", "sampling.temperature=0.5", "--output", str(fork)]
    main([str(parent), *words])
    said = json.loads((fork / "fork.json").read_text())
    assert (said["recorded"], len(said["generated"])) == ({}, 4)


def test_a_directory_that_exists_is_refused(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main([str(parent), "--step", "2", "--output", str(tmp_path)])
    assert caught.value.field == "--output"
