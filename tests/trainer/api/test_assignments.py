"""What scripts assign to a trainer after it is made, and what their classes override: it works as
in TRL, or is refused."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import transformers

from common.errors import ConfigError
from services.data.tiny import problems
from tests.support.errors import raises
from tests.support.paths import ROOT
from trainer import GRPOConfig, GRPOTrainer, OnlineRLTrainer, RLOOTrainer, TrainerConfig
from trainer.api.assignments import ATTRIBUTES, METHODS
from trainer.api.trl import ARGUMENTS, TRAINER

RECORDED = json.loads((ROOT / "tests" / "golden" / "trl_arguments.json").read_text())["members"]
"""Methods and attributes of TRL's trainers and of transformers' Trainer, taken from their source."""
OF_SCRIPTS = {
    *("add_callback", "end", "get_learning_rates", "get_num_trainable_parameters"),
    *("get_optimizer_group", "hyperparameter_search", "init_hf_repo", "is_local_process_zero"),
    *("is_world_process_zero", "log_metrics", "metrics_format", "pop_callback", "predict"),
    *("push_to_hub", "remove_callback", "save_metrics", "save_state", "train"),
}
"""Methods that only scripts call, here as there."""
WORK = frozenset(("train_dataset", "eval_dataset", "reward_funcs"))
CARD = frozenset(("_name", "_paper", "_tag_names", "_template_file"))
"""Attributes that TRL only writes on its model card."""
ROWS = [
    {"prompt": [{"role": "user", "content": p.question}]} for p in islice(problems("train"), 12)
]


def one(completions: list[Any], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def half(completions: list[Any], **_: Any) -> list[float]:
    return [0.5 for _ in completions]


def made(base_model: Path, folder: Path, **fields: Any) -> GRPOTrainer:
    given: dict[str, Any] = {"per_device_train_batch_size": 8, "max_completion_length": 4}
    given |= {"use_cpu": True, "verbose": False, "max_steps": 1}
    config = GRPOConfig(output_dir=folder / "run", **given | fields)
    return GRPOTrainer(str(base_model), one, config, ROWS)


def test_every_member_of_the_trainers_is_known() -> None:
    methods = {name for name in dir(transformers.Trainer) if not name.startswith("__")}
    methods |= set(RECORDED["methods"])
    assert methods <= METHODS | OF_SCRIPTS | CARD | ATTRIBUTES
    known = METHODS | ATTRIBUTES | ARGUMENTS.keys() | TRAINER.keys() | WORK | CARD
    known |= TrainerConfig.model_fields.keys()
    assert set(RECORDED["attributes"]) <= known


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_overridden_methods_are_refused(kind: type[GRPOTrainer]) -> None:
    for name in METHODS:
        own = type("Own", (kind,), {name: lambda self, *_: None})
        with pytest.raises(ConfigError) as caught:
            own("some/model", one, None, ROWS)
        assert caught.value.field == name


def test_assignments_without_effect_are_refused(base_model: Path, tmp_path: Path) -> None:
    for trainer in (made(base_model, tmp_path), online(base_model, tmp_path)):
        for name in sorted((METHODS | ATTRIBUTES | ARGUMENTS.keys()) - WORK):
            with raises(ConfigError, field=f"trainer.{name}"):
                setattr(trainer, name, None)


def online(base_model: Path, folder: Path) -> OnlineRLTrainer:
    config = TrainerConfig(output_dir=folder / "run", max_steps=1, verbose=False)
    return OnlineRLTrainer(config, one, ROWS, model=str(base_model))


def test_a_class_of_a_script_keeps_its_own_attributes_and_methods(
    base_model: Path, tmp_path: Path
) -> None:
    class Own(GRPOTrainer):
        _tag_names = ("own",)

        def __init__(self, *given: Any, **named: Any) -> None:
            self.before = 1
            super().__init__(*given, **named)
            self.after = 2

        def train(self, *given: Any, **named: Any) -> Any:
            self.trained = True
            return super().train(*given, **named)

    config = GRPOConfig(output_dir=tmp_path / "run", use_cpu=True)
    trainer = Own(str(base_model), one, config, ROWS)
    assert (trainer.before, trainer.after) == (1, 2)


def changed(rows: list[dict[str, Any]], word: str) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": f"{word} {number}"}]}
        for number, _ in enumerate(rows)
    ]


@pytest.mark.integration
def test_assigned_data_functions_and_arguments_count(base_model: Path, tmp_path: Path) -> None:
    trainer = made(base_model, tmp_path)
    trainer.train_dataset = changed(ROWS, "train")
    trainer.eval_dataset = changed(ROWS[:2], "held out")
    trainer.reward_funcs = [half, one]
    trainer.args.reward_weights = [1.0, 2.0]
    trainer.args.max_steps = 2
    trainer.args.eval_strategy = "steps"
    trainer.args.eval_steps = 1
    assert trainer.reward_funcs == (half, one)
    result = trainer.train()
    assert [line["step"] for line in result.evaluations] == [0, 1, 2]
    assert result.history[-1]["reward"] == 2.5
    assert set(trainer.samples()["prompt"].str.contains("train")) == {True}
    answers = result.evaluations[0]["answers"]
    assert all("held out" in answer["prompt"] for answer in answers)

    trainer.eval_dataset = None
    with pytest.raises(ConfigError) as refused:
        trainer.train_dataset = ROWS
    assert refused.value.field == "train_dataset"


@pytest.mark.integration
def test_the_config_that_was_given_may_change_before_training(
    base_model: Path, tmp_path: Path
) -> None:
    config = GRPOConfig(
        output_dir=tmp_path / "run",
        per_device_train_batch_size=8,
        max_completion_length=4,
        use_cpu=True,
        verbose=False,
    )
    trainer = GRPOTrainer(str(base_model), one, config, ROWS)
    config.max_steps = 2
    config.learning_rate = 2.5e-5
    config.lr_scheduler_type = "constant"
    config.settings = {"sampling.top_k": 5}
    result = trainer.train()
    assert result.global_step == 2
    assert result.history[-1]["update"]["learning_rate"] == 2.5e-5
    settings = json.loads((result.output_dir / "config.json").read_text())
    assert settings["sampling"]["top_k"] == 5
    assert trainer.args.learning_rate == 2.5e-5


TEXTS = [{"prompt": "What is 1+1?"}, {"prompt": "What is 1+2?"}]
REFUSED: dict[str, tuple[Any, str, str | None]] = {
    "train_dataset": ([], "train_dataset", "[]"),
    "train_dataset ": (TEXTS, "train_dataset", None),
    "train_dataset  ": (None, "train_dataset", None),
    "reward_funcs": (7, "reward_fn", "7"),
    "args.reward_weights": ([1.0, 2.0], "reward_weights", "[1.0, 2.0]"),
    "args.output_dir": (Path("other"), "output_dir", "other"),
    "args.num_generations": (5, "per_device_train_batch_size", "8"),
    "args.eval_strategy": ("steps", "eval_strategy", "10"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_assignments_are_refused(base_model: Path, tmp_path: Path, name: str) -> None:
    assigned, field, value = REFUSED[name]
    trainer = made(base_model, tmp_path)
    owner, _, attribute = name.strip().rpartition(".")
    with raises(ConfigError, field=field, value=value):
        setattr(trainer.args if owner else trainer, attribute, assigned)
        trainer.train()
