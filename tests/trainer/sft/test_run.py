"""A run of supervised fine-tuning: its directory, its end, its resumption, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError
from common.settings.config import Config, load
from learning.ranks import Ranks
from services.data.sft_examples import Examples, load_examples
from tests.support.errors import raises
from tests.support.models.families import FAMILIES
from tests.support.processes.ranks import run_ranks
from tests.support.runs.sft import fine_tune
from trainer.dashboard.runs import RunReader
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy
from trainer.sft.learner import Learner, Update
from trainer.sft.rows import TrainingSequence
from trainer.sft.settings import SFT_SETTINGS

pytestmark = pytest.mark.integration

QUIET = Console(quiet=True)


def settings(policy_dir: Path, directory: Path, *more: str) -> Config:
    words = [
        "--model.name",
        str(policy_dir),
        "--data.source",
        "tiny",
        "--data.num_samples",
        "12",
        "--trainer.batch_size",
        "4",
    ]
    words += [
        "--optimizer.learning_rate",
        "1e-3",
        "--evaluation.samples",
        "3",
        "--trainer.num_epochs",
        "2",
    ]
    return load(
        [*words, "--trainer.run_dir", str(directory), "--checkpoint.every", "2", *more],
        {},
        subset=SFT_SETTINGS,
    )


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(checkpoint / "model.safetensors")
    return found


def test_a_run_writes_its_files_and_its_checkpoint_is_a_model(
    policy_dir: Path, tmp_path: Path
) -> None:
    config = settings(
        policy_dir,
        tmp_path / "run",
        "--trackers.names",
        "tests.support.runs.fake_trackers:Keeps",
        "--evaluation.every",
        "3",
    )
    saved = fine_tune(config, load_examples(config), QUIET)
    lines, evaluations = (
        read_lines(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "evaluations")
    )
    assert [(line["step"], line["total_steps"], line["examples"]) for line in lines] == [
        (step, 6, 4) for step in range(1, 7)
    ]
    assert [line["epoch"] for line in lines] == pytest.approx([step / 3 for step in range(1, 7)])
    assert [(line["step"], line["num_samples"]) for line in evaluations] == [(0, 3), (3, 3), (6, 3)]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert [line["step"] for line in read_lines(tmp_path / "run" / "attempts.jsonl")] == [0]
    assert sorted(path.name for path in saved.parent.iterdir()) == [
        "best",
        "step_000002",
        "step_000004",
        "step_000006",
    ]
    assert (saved.parent / "best").resolve() == saved
    calls = [
        json.loads(line)[0]
        for line in (tmp_path / "run/trackers/kept.jsonl").read_text().splitlines()
    ]
    assert calls == ["start", *["metrics"] * 9, "close"]
    assert RunReader(tmp_path / "run").series()["verdict"] == {"level": "none", "text": ""}

    tokenizer, model = (
        AutoTokenizer.from_pretrained(saved),
        AutoModelForCausalLM.from_pretrained(saved),
    )
    assert tokenizer.chat_template
    assert tuple(model.get_input_embeddings().weight.shape) == tuple(
        weights(saved)["model.embed_tokens.weight"].shape
    )


def test_max_steps_goes_round_the_examples_as_often_as_it_needs(
    policy_dir: Path, tmp_path: Path
) -> None:
    config = settings(
        policy_dir, tmp_path / "run", "--trainer.num_epochs", "1", "--trainer.max_steps", "5"
    )
    fine_tune(config, load_examples(config), QUIET)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], line["total_steps"], line["examples"]) for line in lines] == [
        (step, 5, 4) for step in range(1, 6)
    ]
    assert lines[-1]["epoch"] == pytest.approx(5 / 3)


def test_an_interrupted_run_goes_on_to_the_very_same_weights(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, learn = settings(policy_dir, tmp_path / "run"), Learner.learn

    def ends(self: Learner, rows: list[TrainingSequence]) -> Update:
        if self._policy.step == 3:
            raise RuntimeError("this is the end")
        return learn(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", ends)
        with pytest.raises(RuntimeError, match="this is the end"):
            fine_tune(config, load_examples(config), QUIET)
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    resumed = fine_tune(config, load_examples(config), QUIET)
    other = settings(policy_dir, tmp_path / "other")
    whole = fine_tune(other, load_examples(other), QUIET)
    assert weights(resumed).keys() == weights(whole).keys()
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    losses = [
        [line["update"] for line in read_lines(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "other")
    ]
    assert losses[0] == losses[1]
    assert [line["step"] for line in read_lines(tmp_path / "run" / "attempts.jsonl")] == [0, 2]
    assert fine_tune(config, load_examples(config), QUIET) == resumed  # the run is finished already


@pytest.mark.integration
def test_two_ranks_match_one_and_resume_its_checkpoint(policy_dir: Path, tmp_path: Path) -> None:
    """The model is sharded, a rank without a row takes part, and only rank 0 has the data."""
    constant = (
        "--optimizer.lr_schedule",
        "constant",
        "--trainer.micro_batch_size",
        "1",
        "--trainer.batch_size",
        "3",
    )
    one = settings(policy_dir, tmp_path / "one", *constant, "--trainer.max_steps", "3")
    whole = fine_tune(one, load_examples(one), QUIET)
    first = settings(policy_dir, tmp_path / "two", *constant, "--trainer.max_steps", "2")
    fine_tune(first, load_examples(first), QUIET)
    words = [
        "--model.name",
        str(policy_dir),
        "--data.source",
        "tiny",
        "--data.num_samples",
        "12",
        "--trainer.num_epochs",
        "2",
    ]
    words += [
        "--optimizer.learning_rate",
        "1e-3",
        "--evaluation.samples",
        "3",
        "--trainer.run_dir",
        str(tmp_path / "two"),
    ]
    run_ranks(2, "sft_ranks", *words, *constant, "--trainer.max_steps", "3")
    there = tmp_path / "two" / "checkpoints" / whole.name
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(there)[name], tensor, atol=3e-5, rtol=0, msg=name)
    losses = [
        [line["loss"] for line in read_lines(tmp_path / name / "evaluations.jsonl")]
        for name in ("one", "two")
    ]
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=1e-5)


def test_only_the_adapter_is_trained(policy_dir: Path, tmp_path: Path) -> None:
    config = settings(
        policy_dir,
        tmp_path / "run",
        "--lora.rank",
        "4",
        "--lora.dropout",
        "0.1",
        "--trainer.num_epochs",
        "1",
    )
    saved = fine_tune(config, load_examples(config), QUIET)
    assert (saved / "adapter_model.safetensors").exists()
    assert not (saved / "model.safetensors").exists()
    before, after = (line["loss"] for line in read_lines(tmp_path / "run" / "evaluations.jsonl"))
    assert after < before


def test_a_run_on_answers_is_not_resumed_on_rewards(policy_dir: Path, tmp_path: Path) -> None:
    config = settings(policy_dir, tmp_path / "run", "--trainer.max_steps", "1")
    fine_tune(config, load_examples(config), QUIET)
    with raises(ConfigError, field="trainer.run_dir"):
        Policy.resume(config, Ranks(), tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--algorithm.name", "dapo"], "algorithm.name"),
        (["--sampling.group_size", "4"], "sampling.group_size"),
        (["--rollout.engine", "embedded"], "rollout.engine"),
        (["--reward.require_stop", "true"], "reward.require_stop"),
        (["--trainer.max_staleness", "1"], "trainer.max_staleness"),
        (["--data.curriculum", "difficulty"], "data.curriculum"),
        (["--data.source", "x.jsonl", "--data.columns", "[]"], "data.columns"),
    ],
)
def test_settings_of_training_from_rewards_are_refused(words: list[str], name: str) -> None:
    with raises(ConfigError, field=name):
        load(words, {}, subset=SFT_SETTINGS)


def test_its_own_defaults_have_the_lowest_precedence(tmp_path: Path) -> None:
    assert load([], {}, subset=SFT_SETTINGS).optimizer.learning_rate == 2e-5
    assert load([], {"BATCH_SIZE": "7"}, subset=SFT_SETTINGS).trainer.batch_size == 7
    (tmp_path / "own.yaml").write_text("optimizer: {learning_rate: 3.0e-5}")
    assert (
        load(
            ["--config", str(tmp_path / "own.yaml")], {}, subset=SFT_SETTINGS
        ).optimizer.learning_rate
        == 3e-5
    )
    assert load([], {}).optimizer.learning_rate == 1e-6


def test_the_help_lists_the_settings_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help-all"], {}, prog="rlhf sft", subset=SFT_SETTINGS)
    assert SFT_SETTINGS.meanings.keys() <= set(SFT_SETTINGS.reads)
    shown = capsys.readouterr().out
    assert "--optimizer.learning_rate" in shown
    assert "2e-05" in shown
    assert not {"--algorithm.name", "--sampling.group_size", "--rollout.engine"} & {*shown.split()}


def test_a_long_example_stops_the_start(policy_dir: Path, tmp_path: Path) -> None:
    config = settings(policy_dir, tmp_path / "run")
    examples = load_examples(config)
    long = examples.train[0].model_copy(
        update={
            "id": "long",
            "chat": [{**message, "content": "1 " * 600} for message in examples.train[0].chat],
        }
    )
    with raises(ConfigError, field="data.source") as refused:
        fine_tune(config, Examples([*examples.train, long], []), QUIET)
    assert refused.value.message.startswith("long ")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_answer_beyond_the_length_at_which_longrope_changes_is_refused(tmp_path: Path) -> None:
    directory = FAMILIES["Phi-3"].write(tmp_path / "model")
    shape = json.loads((directory / "config.json").read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    shape["rope_parameters"] |= {"rope_type": "longrope", **factors}
    shape["original_max_position_embeddings"] = 24
    (directory / "config.json").write_text(json.dumps(shape))
    config = settings(directory, tmp_path / "run")
    with raises(ConfigError, field="data.source") as refused:
        fine_tune(config, load_examples(config), QUIET)
    assert refused.value.message.endswith(" 24")
