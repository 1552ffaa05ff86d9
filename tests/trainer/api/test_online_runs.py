"""OnlineRLTrainer: what the reward function sees, training again, output directories, saving,
endings."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError, ServiceError
from services.data.tiny import problems
from tests.support.errors import raises
from trainer import ModelEvaluator, OnlineRLTrainer, RewardFunction, TrainerConfig
from trainer.api.output import remove_run

pytestmark = pytest.mark.integration

ROWS: list[dict[str, Any]] = [
    {"question": p.question, "answer": p.solution, "steps": i % 3}
    for i, p in zip(range(8), problems("train"), strict=False)
]


class Short(RewardFunction):
    """Rewards shorter answers; keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return "short"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        self.calls.append((completions, kwargs))
        return [1 / (1 + len(completion[0]["content"])) for completion in completions]


def fields(base_model: Path, tmp_path: Path, **changes: Any) -> TrainerConfig:
    settings = {
        "model_name_or_path": str(base_model),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "max_new_tokens": 16,
        "max_steps": 2,
        "kl_coef": 0,
        "output_dir": tmp_path / "run",
        "verbose": False,
    }
    return TrainerConfig(**settings | changes)


def test_the_callers_reward_function_gets_chats_and_columns(
    base_model: Path, tmp_path: Path
) -> None:
    reward = Short()
    result = OnlineRLTrainer(
        fields(base_model, tmp_path), reward, datasets.Dataset.from_list(ROWS)
    ).train()
    assert (
        sum(len(completions) for completions, _ in reward.calls) == 2 + 16
    )  # a trial call, then 2 steps × 2 problems × 4 answers
    for completions, kwargs in reward.calls:
        assert all(
            len(kwargs[name]) == len(completions) for name in ("prompt", "ground_truth", "steps")
        )
        for completion, prompt, truth, steps in zip(
            completions, kwargs["prompt"], kwargs["ground_truth"], kwargs["steps"], strict=True
        ):
            assert [message["role"] for message in completion] == ["assistant"]
            row = next(row for row in ROWS if row["question"] == prompt)
            assert row["answer"].endswith(f"#### {truth}")
            assert row["steps"] == steps
    lines = [
        json.loads(line) for line in (result.output_dir / "samples.jsonl").read_text().splitlines()
    ]
    shown = [completion for line in lines for completion in line["completions"]]
    assert len(shown) == 8
    for completion in shown:
        assert completion["reward"] == pytest.approx(1 / (1 + len(completion["text"])))


def test_training_again_adds_the_same_number_of_steps(base_model: Path, tmp_path: Path) -> None:
    trainer = OnlineRLTrainer(fields(base_model, tmp_path), Short(), ROWS)
    first = trainer.train()
    assert (first.global_step, len(first.history)) == (2, 2)
    second = trainer.train()
    assert (second.global_step, [line["step"] for line in second.history]) == (4, [1, 2, 3, 4])
    unbroken = OnlineRLTrainer(
        fields(base_model, tmp_path, max_steps=4, output_dir=tmp_path / "long"), Short(), ROWS
    ).train()
    assert [line["reward"] for line in second.history] == pytest.approx(
        [line["reward"] for line in unbroken.history]
    )


class Watching:
    """A callback that keeps the number of epochs that the run announces."""

    epochs = 0

    def on_train_begin(self, args: Any, state: Any, control: Any) -> None:
        self.epochs = state.num_train_epochs


@pytest.mark.parametrize("problems", [1, 3])
def test_max_steps_goes_round_the_data_as_often_as_it_needs(
    base_model: Path, tmp_path: Path, problems: int
) -> None:
    """Two groups a step; a data set may even be smaller than a step."""
    watching = Watching()
    reward = Short()
    config = fields(base_model, tmp_path, max_steps=4, num_train_epochs=1)
    result = OnlineRLTrainer(config, reward, ROWS[:problems], callbacks=[watching]).train()
    assert [line["step"] for line in result.history] == [1, 2, 3, 4]
    assert watching.epochs == -(-4 * 2 // problems)
    asked = Counter(
        kwargs["prompt"][0] for _, kwargs in reward.calls[1:]
    )  # the first call is a trial
    assert len(asked) == problems
    assert max(asked.values()) - min(asked.values()) <= 1, "every problem as often as the others"


def test_a_resumed_run_does_not_go_beyond_a_lower_max_steps(
    base_model: Path, tmp_path: Path
) -> None:
    OnlineRLTrainer(fields(base_model, tmp_path, max_steps=3), Short(), ROWS).train()
    lower = OnlineRLTrainer(fields(base_model, tmp_path, max_steps=2), Short(), ROWS)
    assert lower.train(resume_from_checkpoint=True).global_step == 3


def test_a_run_without_a_step_is_no_run(base_model: Path, tmp_path: Path) -> None:
    """It ended before the first step: the script that is corrected then starts as if new."""
    calls: list[int] = []

    def fails_after_the_trial(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) > 1:
            raise ValueError("boom")
        return [1.0] * len(completions)

    with raises(ServiceError, field='settings["limits.max_failed_groups"]'):
        OnlineRLTrainer(fields(base_model, tmp_path), fails_after_the_trial, ROWS).train()
    fixed = OnlineRLTrainer(fields(base_model, tmp_path), Short(), ROWS).train()
    assert [line["step"] for line in fixed.history] == [1, 2]

    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "qwen2"}')
    other = fields(base_model, tmp_path, output_dir=tmp_path / "other")
    with raises(ConfigError, field="output_dir"):
        OnlineRLTrainer(other, Short(), ROWS).train()


LONGER = {"max_steps": 6, "lr_scheduler_type": "linear"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (LONGER, "step 2 had the learning rate 5e-05, and step 3 has 6.67e-05"),
        (LONGER | {"lr_scheduler_type": "constant"}, "step 3 has 0.0001"),
        (LONGER | {"max_steps": 2}, ""),
    ],
)
def test_a_resume_says_that_the_learning_rate_jumps(
    base_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    told: str,
) -> None:
    rate = {"learning_rate": 1e-4}
    before = fields(base_model, tmp_path, **LONGER | {"max_steps": 2} | rate)
    OnlineRLTrainer(before, Short(), ROWS).train()
    assert "had the learning rate" not in caplog.text
    after = fields(base_model, tmp_path, **changes | rate)
    OnlineRLTrainer(after, Short(), ROWS).train(resume_from_checkpoint=True)
    assert told in caplog.text
    assert ("had the learning rate" in caplog.text) == bool(told)


def test_an_output_directory_with_a_run_is_not_reused_silently(
    base_model: Path, tmp_path: Path
) -> None:
    OnlineRLTrainer(fields(base_model, tmp_path), Short(), ROWS).train()
    again = OnlineRLTrainer(fields(base_model, tmp_path, max_steps=3), Short(), ROWS)
    with raises(ConfigError, field="output_dir"):
        again.train()
    resumed = again.train(resume_from_checkpoint=True)
    assert [line["step"] for line in resumed.history] == [1, 2, 3]
    finished = OnlineRLTrainer(fields(base_model, tmp_path, max_steps=3), Short(), ROWS).train(
        resume_from_checkpoint=True
    )
    assert finished.global_step == 3  # nothing was left to do
    replaced = OnlineRLTrainer(
        fields(base_model, tmp_path, max_steps=1, overwrite_output_dir=True), Short(), ROWS
    ).train()
    assert [line["step"] for line in replaced.history] == [1]
    remove_run(replaced.output_dir)
    assert [path.name for path in replaced.output_dir.iterdir()] == [".lock"]


def test_resuming_needs_a_run_but_no_checkpoint(base_model: Path, tmp_path: Path) -> None:
    trainer = OnlineRLTrainer(fields(base_model, tmp_path, max_steps=1), Short(), ROWS)
    with raises(ConfigError, field="resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert not any(trainer.output_dir.iterdir() if trainer.output_dir.exists() else ())
    # A run that was killed before its first checkpoint begins again.
    trainer.output_dir.mkdir(exist_ok=True)
    (trainer.output_dir / "attempts.jsonl").write_text('{"time": 0.0, "step": 0}\n')
    assert trainer.train(resume_from_checkpoint=True).global_step == 1


def test_one_call_begins_a_run_or_continues_it(base_model: Path, tmp_path: Path) -> None:
    def train(max_steps: int) -> list[int]:
        config = fields(base_model, tmp_path, max_steps=max_steps)
        result = OnlineRLTrainer(config, Short(), ROWS).train(resume_from_checkpoint="auto")
        return [line["step"] for line in result.history]

    assert train(1) == [1]
    first = (tmp_path / "run/metrics.jsonl").read_text()
    assert train(2) == [1, 2]
    assert (tmp_path / "run/metrics.jsonl").read_text().startswith(first)
    assert train(2) == [1, 2]  # it has finished


def test_without_an_output_directory_a_new_one_is_made(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = OnlineRLTrainer(
        fields(base_model.resolve(), tmp_path, max_steps=1, output_dir=None), Short(), ROWS
    )
    result = trainer.train()
    assert result.output_dir == trainer.output_dir
    assert result.output_dir.parts[0] == "outputs"
    assert result.output_dir.name.startswith("grpo-")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's call
def test_save_model_writes_a_plain_model_directory(base_model: Path, tmp_path: Path) -> None:
    trainer = OnlineRLTrainer(fields(base_model, tmp_path, trainer_type="ppo"), Short(), ROWS)
    with raises(ConfigError, field="path"):
        trainer.save_model(tmp_path / "model")
    result = trainer.train()
    target = tmp_path / "deep" / "model"
    target.mkdir(parents=True)
    (target / "model-00001-of-00002.safetensors").write_bytes(b"of a larger model that was here")
    (target / "model.safetensors.index.json").write_text("{}")
    (target / "notes.txt").write_text("mine")
    old = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base_model),
        LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    )
    old.save_pretrained(target)  # transformers would apply it to the new weights
    (target / "added_tokens.json").write_text('{"<old>": 3}')
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "rag.jinja").write_text("old")
    assert trainer.save_model(target) == target
    names = {path.name for path in target.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "notes.txt"}
    assert not names & {
        "trainer_state.json",
        "state",
        "critic",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_config.json",
        "adapter_model.safetensors",
        "added_tokens.json",
    }
    assert not list((target / "additional_chat_templates").iterdir())
    saved, trained = (
        AutoModelForCausalLM.from_pretrained(path) for path in (target, result.checkpoint)
    )
    torch.testing.assert_close(saved.state_dict(), trained.state_dict())
    assert AutoTokenizer.from_pretrained(target).chat_template
    with raises(ConfigError, field="path"):
        trainer.save_model(target / "notes.txt")
    with raises(ConfigError, field="path"):
        trainer.save_model(result.checkpoint)
    AutoModelForCausalLM.from_pretrained(result.checkpoint)


def test_evaluate_uses_the_current_weights(base_model: Path, tmp_path: Path) -> None:
    held_out = [
        {"question": p.question, "answer": p.solution}
        for p, _ in zip(problems("test"), range(4), strict=False)
    ]
    trainer = OnlineRLTrainer(
        fields(base_model, tmp_path, learning_rate=0.03, temperature=2.0), Short(), ROWS, held_out
    )
    before = trainer.evaluate()
    assert before["model"] == str(base_model)
    result = trainer.train()
    after = trainer.evaluate(k=2)
    assert after["model"] == str(result.checkpoint)
    assert after["responses"] != before["responses"]
    assert len(after["samples"][0]) == 2
    apart = ModelEvaluator(result.checkpoint, max_new_tokens=16).evaluate(held_out, Short())
    assert apart["responses"] == after["responses"]
    with raises(ConfigError, field="dataset"):
        OnlineRLTrainer(fields(base_model, tmp_path), Short(), ROWS).evaluate()


def test_a_broken_reward_function_stops_the_run(base_model: Path, tmp_path: Path) -> None:
    class Broken(Short):
        def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
            raise KeyError("steps_taken")

    with pytest.raises(
        ConfigError,
        match=r"a made-up answer: short: KeyError: 'steps_taken'\n.*test_online_runs",
    ):
        OnlineRLTrainer(fields(base_model, tmp_path), Broken(), ROWS).train()


def test_train_after_an_error_goes_on_from_the_newest_checkpoint(
    base_model: Path, tmp_path: Path
) -> None:
    class Fragile(Short):
        broken = True

        def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
            if self.broken and sum(len(texts) for texts, _ in self.calls) >= 8:  # after one step
                raise KeyError("steps_taken")
            return super().__call__(completions, **kwargs)

    reward = Fragile()
    trainer = OnlineRLTrainer(fields(base_model, tmp_path, save_steps=1, max_steps=3), reward, ROWS)
    with pytest.raises(ServiceError):
        trainer.train()
    reward.broken = False
    assert [line["step"] for line in trainer.train().history] == [1, 2, 3]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Short, r"not a reward function.*field: reward_fn.*add parentheses"),
        (
            7,
            r"not a reward function.*a function of completions, or an instance of a subclass of RewardFunction",
        ),
        ("accuracy_reward", r"field: reward_fn.*value: accuracy_reward.*a function itself"),
        (torch.nn.Linear(1, 1), r"not a reward function.*a reward model by its name"),
        ([], r"there is no reward function"),
    ],
)
def test_what_is_not_a_reward_function_is_refused(
    base_model: Path, tmp_path: Path, reward: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OnlineRLTrainer(fields(base_model, tmp_path), reward, ROWS)


def test_unsuitable_data_is_refused_before_anything_is_loaded(
    base_model: Path, tmp_path: Path
) -> None:
    with raises(ConfigError, field="train_dataset", value="[]"):
        OnlineRLTrainer(fields(base_model, tmp_path), Short(), [])
    with raises(ConfigError, field="gradient_accumulation_steps"):
        OnlineRLTrainer(fields(base_model, tmp_path, max_steps=None), Short(), ROWS[:1])
    with raises(ConfigError, field="eval_dataset", value="[]"):
        OnlineRLTrainer(fields(base_model, tmp_path), Short(), ROWS, [])
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_load_is_reported_under_its_field(
    base_model: Path, tmp_path: Path
) -> None:
    missing = str(tmp_path / "nothing")
    with raises(ConfigError, field="model_name_or_path"):
        OnlineRLTrainer(
            fields(base_model, tmp_path, model_name_or_path=missing), Short(), ROWS
        ).train()
    with raises(ConfigError, field="ref_model_name_or_path"):
        OnlineRLTrainer(
            fields(
                base_model,
                tmp_path,
                ref_model_name_or_path=missing,
                kl_coef=0.1,
                output_dir=tmp_path / "other",
            ),
            Short(),
            ROWS,
        ).train()


def test_an_optimizer_keeps_its_betas_beside_settings(base_model: Path, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4, betas=(0.8, 0.9))
    config = fields(base_model, tmp_path, settings={"algorithm.entropy_coef": 0.1})
    trainer = OnlineRLTrainer(config, Short(), ROWS, optimizers=(optimizer, None))
    assert trainer.config.settings == {
        "algorithm.entropy_coef": 0.1,
        "optimizer.adam_betas": (0.8, 0.9),
    }
    assert trainer.config.learning_rate == 3e-4


def test_a_changed_config_is_checked_again(base_model: Path, tmp_path: Path) -> None:
    config = fields(base_model, tmp_path)
    config.num_generations = 3
    with raises(ConfigError, field="per_device_train_batch_size", value="8"):
        OnlineRLTrainer(config, Short(), ROWS)
