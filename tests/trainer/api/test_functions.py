"""Plain functions, callbacks and objects in real runs of one or two steps on the built-in task."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from common.errors import ConfigError
from services.data.tiny import problems
from tests.support.errors import raises
from trainer import (
    CompositeRewardFunction,
    GRPOConfig,
    GRPOTrainer,
    MathRewardFunction,
    OnlineRLTrainer,
    TrainerConfig,
)
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration

ROWS = [
    {"prompt": [{"role": "user", "content": p.question}], "answer": p.solution, "level": i % 2}
    for i, p in zip(range(12), problems("train"), strict=False)
]
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_completion_length": 12,
    "use_cpu": True,
}


def length(completions: list[Any], **_: Any) -> list[float]:
    return [len(completion[0]["content"]) / 50 for completion in completions]


def config(folder: Path, **fields: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder / "run", **SMALL | {"max_steps": 1, "verbose": False} | fields
    )


def test_functions_get_what_trl_gives_them(base_model: Path, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def tokens(
        prompts: Any,
        completions: Any,
        completion_ids: Any,
        answer: Any,
        ground_truth: Any,
        level: Any,
        **kwargs: Any,
    ) -> list[float | None]:
        calls.append(
            {
                "prompts": prompts,
                "completions": completions,
                "ids": completion_ids,
                "answer": answer,
            }
        )
        assert all(
            text.endswith(f"#### {truth}") for text, truth in zip(answer, ground_truth, strict=True)
        )
        kwargs["log_metric"]("called", 1.0)
        kwargs["log_extra"]("tokens", [len(ids) for ids in completion_ids])
        assert kwargs["trainer_state"].global_step <= 2
        return [
            len(ids) / 12 if odd else None for ids, odd in zip(completion_ids, level, strict=True)
        ]

    async def ends(completions: Any, **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(completion[-1]["content"][-1:].isdigit()) for completion in completions]

    frame = pandas.DataFrame(ROWS)
    held_out = {"first": Dataset.from_list(ROWS[:2]), "rest": iter(ROWS[2:4])}
    settings = config(tmp_path, max_steps=2, reward_weights=[0.5, 2.0])
    trainer = GRPOTrainer(str(base_model), [tokens, ends], settings, frame, held_out)
    result = trainer.train()

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    for call in calls[1:]:  # the first call has made-up answers
        for prompt, completion, ids in zip(
            call["prompts"], call["completions"], call["ids"], strict=True
        ):
            assert prompt[0]["role"] == "user"
            assert tokenizer.decode(ids, skip_special_tokens=True) == completion[0]["content"]
    groups = read_lines(result.output_dir / "samples.jsonl")
    for completion in (completion for group in groups for completion in group["completions"]):
        parts = completion["components"]
        assert completion["reward"] == pytest.approx(
            0.5 * (parts["tokens"] or 0) + 2 * parts["ends"], abs=1e-6
        )
    assert [set(line["logged"]) for line in result.history] == [{"called"}] * 2
    rows = read_lines(result.output_dir / "extras.jsonl")
    assert [row["step"] for row in rows if "evaluation" not in row] == [1] * 8 + [2] * 8
    assert [row["step"] for row in rows if "evaluation" in row] == [0] * 4 + [2] * 4
    assert all(row["function"] == "tokens" and 1 <= row["tokens"] <= 12 for row in rows)
    table = trainer.samples()
    assert list(table.columns) == ["step", "prompt", "completion", "reward", "correct"]
    assert len(table) == 16
    assert set(table["correct"]) == {None}, "the rewards are not verdicts"


class Watch(TrainerCallback):  # type: ignore[misc]
    """A transformers callback that stops after two steps, with a checkpoint of the first."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert isinstance(args, TrainerConfig)
        assert hasattr(kwargs["model"], "forward")
        self.events.append(("begin", state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.events.append(("log", logs["step"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 2
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.events.append(("evaluate", metrics["step"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("end", state.global_step))


class Short:
    """A callback that declares only the arguments it wants."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, state: Any) -> None:
        self.steps.append(state.global_step)


def test_callbacks_follow_a_run_and_can_stop_it(base_model: Path, tmp_path: Path) -> None:
    watch, short = Watch(), Short()
    trainer = GRPOTrainer(
        str(base_model),
        length,
        config(tmp_path, max_steps=9),
        ROWS,
        ROWS[:2],
        callbacks=[watch, short],
        optimizers=(None, None),
    )
    result = trainer.train()
    assert result.global_step == 2
    assert short.steps == [1, 2]
    assert watch.events == [
        *(("begin", 9), ("log", 0), ("evaluate", 0)),
        *(("log", 1), ("save", 1), ("log", 2)),
        *(("log", 2), ("evaluate", 2), ("save", 2), ("log", 2), ("end", 2)),
    ]
    assert [line["step"] for line in trainer.state.log_history] == [0, 1, 2, 2, 2]
    evaluation, first = trainer.state.log_history[:2]
    assert first["loss"] == result.history[0]["update"]["loss"], "TRL's names are there too"
    assert first["rewards/length/mean"] == first["reward"] == result.history[0]["reward"]
    assert evaluation["eval_reward"] == result.evaluations[0]["mean_reward"]
    assert trainer.state.best_metric == result.evaluations[1]["mean_reward"]
    assert {path.name for path in (result.output_dir / "checkpoints").glob("step_*")} == {
        "step_000001",
        "step_000002",
    }


def test_a_checkpoint_that_is_due_and_asked_for_is_written_once(
    base_model: Path, tmp_path: Path
) -> None:
    saved: list[int] = []

    class Asks:
        def on_step_end(self, control: Any) -> None:
            control.should_save = control.should_evaluate = True

        def on_save(self, state: Any) -> None:
            saved.append(state.global_step)

    result = GRPOTrainer(
        str(base_model),
        length,
        config(tmp_path, max_steps=2, save_steps=1, save_total_limit=1),
        ROWS,
        callbacks=[Asks()],
    ).train()
    assert saved == [1, 2]
    links = [path.name for path in result.output_dir.glob("checkpoint-*")]
    assert links == ["checkpoint-2"], "the other one is gone"
    assert result.evaluations == [], "there is nothing held out"


def test_hooks_on_epochs_are_called_and_other_hooks_are_accepted(
    base_model: Path, tmp_path: Path
) -> None:
    called: list[tuple[str, int]] = []

    class Epochs(TrainerCallback):  # type: ignore[misc]
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            called.append(("begin", state.global_step))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            called.append(("end", state.global_step))

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    settings = config(tmp_path, max_steps=4, num_generations=4)
    GRPOTrainer(str(base_model), length, settings, ROWS[:4], callbacks=[Epochs()]).train()
    assert called == [("begin", 0), ("end", 2), ("begin", 2), ("end", 4)]


def test_what_is_no_callback_is_refused(base_model: Path, tmp_path: Path) -> None:
    with raises(ConfigError, field="callbacks"):
        GRPOTrainer(str(base_model), length, config(tmp_path), ROWS, callbacks=[7])


def test_a_model_and_a_tokenizer_as_objects(
    base_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peft import LoraConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base_model),
        AutoTokenizer.from_pretrained(base_model),
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = config(tmp_path, learning_rate=1e-2, push_to_hub=True, hub_model_id="me/tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    given = {"processing_class": tokenizer, "peft_config": lora, "optimizers": (optimizer, None)}
    trainer = GRPOTrainer(model, length, settings, ROWS, ROWS[:2], **given)
    result = trainer.train()
    assert result.history[0]["update"]["learning_rate"] == 2e-2
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed
    assert all("q_proj" in name or "v_proj" in name for name in changed)
    saved = AutoModelForCausalLM.from_pretrained(result.output_dir / "hub").state_dict()
    torch.testing.assert_close(dict(saved), dict(model.state_dict()))
    card = (result.output_dir / "hub" / "README.md").read_text(encoding="utf-8")
    for words in (
        "trained with grpo",
        "`lora.rank` | `4`",
        "12 training problems",
        "95 % interval",
        "`length`",
    ):
        assert words in card
    assert "not pushed: the hub cannot be reached" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's call
def test_the_adapter_of_a_peft_model_is_kept_and_the_new_one_is_loaded_into_it(
    base_model: Path, tmp_path: Path
) -> None:
    """Its function afterwards is that of the saved model, although the adapter that it had was not
    zero."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), lora)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = config(tmp_path, learning_rate=1e-2)
    model.peft_config["default"].init_lora_weights = True
    trainer = GRPOTrainer(model, length, settings, ROWS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    result = trainer.train()
    assert trainer.model is model
    assert any(
        not torch.equal(tensor, before[name])
        for name, tensor in model.state_dict().items()
        if "lora_B" in name
    )
    saved = AutoModelForCausalLM.from_pretrained(trainer.save_model(tmp_path / "whole"))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, saved(tokens).logits)
    with raises(ConfigError, field="peft_config"):
        GRPOTrainer(model, length, settings, ROWS, peft_config=lora)

    links = [path.name for path in result.output_dir.glob("checkpoint-*")]
    assert links == ["checkpoint-1"]
    older = result.output_dir / "checkpoint-7"
    with raises(ConfigError, field="resume_from_checkpoint", value=str(older)) as caught:
        trainer.train(resume_from_checkpoint=str(older))
    assert "step_000001" in str(caught.value.remedy)


def test_only_grpo_trainer_continues_a_text_as_it_is(base_model: Path, tmp_path: Path) -> None:
    rows, seen = [{"prompt": f"{n}+1="} for n in range(8)], []

    def texts(completions: Any, prompts: Any, **_: Any) -> list[float]:
        seen.extend([*completions, *prompts])
        return [len(text) / 9 for text in completions]

    fields = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_new_tokens": 4,
        "max_steps": 1,
    }
    runs = {
        "trl": GRPOTrainer(str(base_model), texts, config(tmp_path), iter(rows)),
        "own": OnlineRLTrainer(
            TrainerConfig(output_dir=tmp_path / "own", verbose=False, **fields),
            texts,
            rows,
            model=str(base_model),
        ),
    }
    tokens = {name: len(_first_prompt(trainer)) for name, trainer in runs.items()}
    assert all(isinstance(text, str) for text in seen)
    assert tokens["trl"] < tokens["own"]


def _first_prompt(trainer: OnlineRLTrainer) -> list[int]:
    result = trainer.train()
    (group, *_) = read_lines(result.output_dir / "samples.jsonl")
    return (
        list(group["prompt_token_ids"])
        if "prompt_token_ids" in group
        else list(group["prompt_tokens"])
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_funcs": None}, r"field: reward_funcs"),
        ({"train_dataset": None}, r"field: train_dataset"),
        (
            {"tools": [print]},
            r"tool print .*cannot be described.*field: tools.*give every argument a type",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, r"argument quantization_config"),
        (
            {"args": {"reward_weights": [1.0]}, "reward_funcs": [length, length]},
            r"there are 2 reward functions.*reward_weights",
        ),
        (
            {"args": {"max_steps": -1}, "train_dataset": iter(ROWS)},
            r"the data set has no length.*field: max_steps",
        ),
        (
            {"train_dataset": [{"prompt": "a?", "completion_ids": 1}]},
            r"'completion_ids'.*rename the column",
        ),
        (
            {"args": {"model_name_or_path": "other"}},
            r"the argument model names another model.*field: model_name_or_path",
        ),
        ({"model": object()}, r"this type cannot be saved.*field: model"),
        ({"peft_config": object()}, r"supports only LoRA adapters"),
    ],
)
def test_missing_or_impossible_arguments_are_refused_at_once(
    base_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "model": str(base_model),
        "reward_funcs": length,
        "train_dataset": ROWS,
    } | changes
    given["args"] = config(tmp_path, **given.get("args", {}))
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(**given)


def test_a_curriculum_prefers_the_same_prompts_when_all_rewards_are_lower(
    base_model: Path, tmp_path: Path
) -> None:
    """Rewards that are no verdicts have no zero."""
    drawn = []
    for shift in (0.0, -10.0):

        def shifted(completions: list[Any], shift: float = shift, **_: Any) -> list[float]:
            return [score + shift for score in length(completions)]

        settings = config(
            tmp_path / str(shift),
            max_steps=8,
            num_generations=4,
            learning_rate=1e-12,
            settings={"data.curriculum": "difficulty"},
        )
        trainer = GRPOTrainer(str(base_model), shifted, settings, ROWS[:4])
        trainer.train()
        with closing(sqlite3.connect(trainer.output_dir / "state" / "data" / "stream.db")) as db:
            drawn.append(db.execute("SELECT place, free FROM draws").fetchall())
    assert drawn[0] == drawn[1]
    assert any(not free for _, free in drawn[0]), "some were drawn by their pass rate"


@pytest.mark.parametrize("is_part", [False, True])
def test_rows_without_the_column_that_a_function_reads_are_named_and_not_the_function(
    is_part: bool, base_model: Path, tmp_path: Path
) -> None:
    function = MathRewardFunction()
    rows = [{"prompt": f"What is {number} + 1?"} for number in range(12)]
    fields = {"model_name_or_path": str(base_model), "output_dir": tmp_path, "verbose": False}
    reward = CompositeRewardFunction([function]) if is_part else function
    trainer = OnlineRLTrainer(TrainerConfig(**fields), reward, rows)
    with raises(ConfigError, field="train_dataset", value="train_dataset-0, column ground_truth"):
        trainer.train()
