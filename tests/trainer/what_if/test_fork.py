"""A fork begins with the state of the run after a step, uses the answers that stay valid, and learns
what the change makes of them.
"""

import json
from pathlib import Path

import pytest

from common.errors import ConfigError, ServiceError
from common.process.imports import import_callable
from tests.support.paths import SHARED_DATA
from tests.support.runs.audits import audited
from tests.support.runs.in_process import quiet
from trainer.api.online import OnlineRLTrainer
from trainer.api.settings import TrainerConfig
from trainer.cli import train_math
from trainer.observe.group_files import LINES
from trainer.observe.regrades import read_regrades
from trainer.observe.run_dir import read_lines
from trainer.policy.trained_prompts import TRAINED_PROMPTS
from trainer.start.in_process import train_in_process
from trainer.what_if import regrade
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
    trained_on = f"checkpoints/step_000004/{TRAINED_PROMPTS}"
    assert (fork / trained_on).read_bytes() == (parent / trained_on).read_bytes()


def test_another_reward_grades_the_recorded_answers(parent: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    functions = '[{"name": "length", "soft_chars": 1, "hard_chars": 30}]'
    words = [
        "--step",
        "2",
        "--set",
        f"reward.functions={functions}",
        "--set",
        "trainer.max_steps=3",
    ]
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


def test_a_prepared_fork_goes_on_as_a_resumed_run(
    parent: Path, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 2, whose checkpoint is copied; the changed setting is given at the launch."""
    fork = tmp_path / "fork"
    change = "optimizer.learning_rate=1e-3"
    main([str(parent), "--step", "2", "--set", change, "--output", str(fork), "--prepare"])
    assert (
        f"--env RUN_DIR={fork} --env RLHF_OPTIMIZER__LEARNING_RATE=1e-3" in capsys.readouterr().out
    )
    assert weights(fork) == weights(parent)[:2]

    words = ["--reproducible=true", "--trainer.max_staleness=0", f"--{change}"]
    train_in_process(audited(base_model, fork, *words), quiet())
    alone = tmp_path / "alone"
    main([str(parent), "--step", "2", "--set", change, "--output", str(alone)])
    assert weights(fork) == weights(alone)
    assert weights(fork)[:2] == weights(parent)[:2]
    assert weights(fork)[2] != weights(parent)[2]


LEARNT = {"trainer.audit": True, "reproducible": True, "trainer.max_staleness": 0}


def trained(base_model: Path, run_dir: Path, dataset: Path) -> None:
    """Makes a run of four steps as `rlhf train` does."""
    words = ["--model", str(base_model), "--dataset", str(dataset), "--num-samples", "12"]
    words += ["--max-new-tokens", "24", "--max-steps", "4", "--output-dir", str(run_dir)]
    words += ["--eval-samples", "1", "--learning-rate", "1e-3", "--quiet"]
    words += [word for name in LEARNT for word in ("--set", f"{name}={LEARNT[name]}")]
    train_math.main(words)


def test_a_run_of_rlhf_train_on_a_file_is_forked(base_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rows = tmp_path / "rows.jsonl"
    lines = [{"question": f"Ann has {n} eggs. How many?", "answer": str(n)} for n in range(20)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained(base_model, run_dir, rows)
    fork = tmp_path / "fork"
    main([str(run_dir), "--step", "1", "--output", str(fork)])
    assert weights(fork) == weights(run_dir)
    said = json.loads((fork / "fork.json").read_text())
    assert set(said["recorded"].values()) == {2}


@pytest.mark.skipif(not (SHARED_DATA / "gsm8k").is_dir(), reason="the GSM8K files are not here")
def test_a_run_on_gsm8k_is_graded_and_trained_again_as_it_was(
    base_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    rows = (SHARED_DATA / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    trained(base_model, run_dir, tmp_path / "rows.jsonl")
    regrade.main([str(run_dir)])
    assert read_regrades(run_dir) == {}
    main([str(run_dir), "--step", "2", "--output", str(tmp_path / "fork")])
    assert weights(tmp_path / "fork") == weights(run_dir)


def test_without_an_audit_a_run_is_forked_from_its_checkpoints(
    base_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ["--reproducible=true", "--trainer.max_staleness=0", "--trainer.audit=false"]
    train_in_process(audited(base_model, run_dir, *words), quiet())
    settings = run_dir / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"hidden_size": 64}))
    fork = [str(run_dir), "--output", str(tmp_path / "fork"), "--step"]
    with pytest.raises(ConfigError) as caught:
        main([*fork, "3"])
    assert caught.value.field == "--step"
    main([*fork, "2"])
    assert weights(tmp_path / "fork") == weights(run_dir)
    said = json.loads((tmp_path / "fork/fork.json").read_text())
    assert set(said["recorded"].values()) == {3}


def test_a_program_has_to_name_its_rewards_and_its_rows_are_kept(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewarding.py").write_text(
        "def paid(completions, cost, **_):\n"
        "    return [len(text) % price for text, price in zip(completions, cost)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = tmp_path / "run"
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        output_dir=run_dir,
        max_steps=3,
        max_new_tokens=24,
        learning_rate=1e-3,
        settings=LEARNT,
        verbose=False,
    )
    rows = [{"prompt": f"Ann has {n} eggs.", "cost": n % 3 + 2} for n in range(12)]
    paid = import_callable("rewarding:paid", "")
    OnlineRLTrainer(config, paid, rows).train()

    words = [str(run_dir), "--step", "1", "--output", str(tmp_path / "fork")]
    with pytest.raises(ConfigError) as caught:
        main(words)
    assert caught.value.field == "--set reward.functions"
    words += ["--set", 'reward.functions=["rewarding:paid"]']
    with pytest.raises(ConfigError) as caught:
        main([*words, "--prepare"])
    assert caught.value.field == "--set data.source"
    main(words)
    assert weights(tmp_path / "fork") == weights(run_dir)


def test_problems_that_are_left_out_are_not_asked_again(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [{"question": f"Ann has {n} eggs. How many?", "answer": str(n)} for n in range(20)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "dropping.py").write_text(
        "def keep(row):\n    return row if int(row['answer']) % 2 else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = tmp_path / "run"
    train_in_process(audited(base_model, run_dir, "--data.source", str(rows)), quiet())
    fork = tmp_path / "fork"
    words = ["--step", "2", "--set", "data.map=dropping:keep", "--output", str(fork)]
    main([str(run_dir), *words])

    said = json.loads((fork / "fork.json").read_text())
    assert (said["recorded"], len(said["generated"])) == ({}, 8)
    asked = [[group["prompt"] for group in line["groups"]] for line in read_lines(fork / LINES)]
    kept = {line["question"] for line in lines if int(line["answer"]) % 2}
    assert not kept.issuperset(asked[0] + asked[1]), "the steps in common are those of the run"
    assert kept.issuperset(asked[2] + asked[3])


@pytest.mark.parametrize(
    "change",
    [
        'reward.functions=["nowhere:paid"]',
        'reward.functions=["json:nothing"]',
        "data.map=json:loads",
        "data.source=nowhere.jsonl",
        "environment.name=python:nowhere:Tool",
        "replay.priority=nowhere:first",
        "replay.priority=json:nothing",
        "model.chat_template={{ messages",
        "sampling.group_size=1",
        "optimizer.learning_rat=1",
        "trainer.max_steps=3",
    ],
)
def test_what_is_refused_is_refused_before_anything_is_written(
    change: str, parent: Path, tmp_path: Path
) -> None:
    fork = tmp_path / "fork"
    with pytest.raises(ConfigError) as caught:
        main([str(parent), "--step", "3", "--set", change, "--output", str(fork)])
    assert change.partition("=")[0] in str(caught.value)
    assert caught.value.remedy
    assert not fork.exists()


def test_a_fork_that_fails_before_its_first_step_leaves_its_name_free(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells before the first answers that this reward fails."""
    (tmp_path / "failing.py").write_text("def paid(completions, **_):\n    raise OSError('gone')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the workers
    monkeypatch.syspath_prepend(tmp_path)
    fork = tmp_path / "fork"
    words = ["--set", 'reward.functions=["failing:paid"]', "--set", "limits.max_failed_groups=1"]
    with pytest.raises(ServiceError, match="gone"):
        main([str(parent), "--step", "2", *words, "--output", str(fork)])
    assert not fork.exists()


def test_a_directory_that_exists_is_refused(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main([str(parent), "--step", "2", "--output", str(tmp_path)])
    assert caught.value.field == "--output"
