"""TrainerConfig alone: what it refuses, and the system configuration it results in."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from tests.support.errors import raises
from trainer.api.grpo import GRPOConfig
from trainer.api.refusals import with_names
from trainer.api.settings import TrainerConfig

OUT = Path("out")


def test_the_defaults_are_those_that_the_docs_promise() -> None:
    config = TrainerConfig()
    assert config.num_generations == 4
    assert config.learning_rate == 5e-6
    assert config.num_train_epochs == 1
    assert config.kl_coef == 0.1
    assert config.clip_range == 0.2
    assert config.use_gpu is False
    assert config.bf16 is False
    assert config.problems_per_step == 8  # 8 answers × 4 passes / 4 answers per problem


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"betta": 0.1}, "betta", "0.1"),
        ({"learning_rat": 1}, "learning_rat", "1"),
        ({"learning_rate": -1}, "learning_rate", "-1"),
        ({"trainer_type": "dpo"}, "trainer_type", "dpo"),
        ({"max_steps": 0}, "max_steps", "0"),
        ({"num_generations": 1}, "algorithm.advantage", None),
        ({"num_generations": 5}, "per_device_train_batch_size", "8"),
        ({"save_steps": -1}, "save_steps", "-1"),
        ({"eval_steps": -3}, "eval_steps", "-3"),
        ({"critic_learning_rate": 1e-4}, "critic_learning_rate", "0.0001"),
        ({"kl_coef": 0, "ref_model_name_or_path": "x"}, "ref_model_name_or_path", None),
        ({"bf16": True}, "bf16", "True"),
        (
            {
                "trainer_type": "ppo",
                "num_generations": 1,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 1,
            },
            "algorithm.mini_batches",
            None,
        ),
        ({"settings": {"seed": 1}}, 'settings["seed"]', "1"),
        (
            {"settings": {"sampling.system_prompt": "Be brief."}},
            'settings["sampling.system_prompt"]',
            "Be brief.",
        ),
        (
            {"settings": {"rollout.max_context_tokens": 256}},
            'settings["rollout.max_context_tokens"]',
            "256",
        ),
        (
            {"settings": {"optimizer": {"max_grad_norm": 1}}},
            'settings["optimizer"]',
            "{'max_grad_norm': 1}",
        ),
        ({"settings": {"data.source": "tiny"}}, 'settings["data.source"]', "tiny"),
        ({"settings": {"reward.functions": ["math"]}}, 'settings["reward.functions"]', "['math']"),
        ({"settings": {"rollout.router_port": 1}}, 'settings["rollout.router_port"]', "1"),
        ({"settings": {"trainer.port": 1}}, 'settings["trainer.port"]', "1"),
        ({"settings": {"trainer.nope": 1}}, "trainer.nope", "1"),
        ({"settings": {"algorithm.gamma": 0.9}}, "algorithm.gamma", None),
    ],
)
def test_invalid_settings_are_refused_with_field_value_and_remedy(
    fields: dict[str, Any], field: str, value: str | None
) -> None:
    with raises(ConfigError, field=field, value=value) as caught:
        TrainerConfig(**fields)
    assert caught.value.remedy


def test_an_error_has_the_name_of_its_field_and_says_what_its_other_settings_are() -> None:
    error = ConfigError(
        "model.reference differs",
        field="algorithm.kl_coef",
        remedy="set model.name.",
        code="not_there",
        about={"cause": "engine_failed"},
        settings=("algorithm.kl_coef", "model.name", "model.name", "trainer.port"),
    )
    own = with_names(error, TrainerConfig().names())
    assert own.message == error.message
    assert own.field == "kl_coef"
    assert own.remedy == "set model.name.; model.name is model_name_or_path here"
    assert str(own).endswith(f"field: kl_coef · remedy: {own.remedy}")
    assert (error.field, error.remedy) == ("algorithm.kl_coef", "set model.name."), "unchanged"
    assert (own.event()["code"], own.event()["cause"]) == ("not_there", "engine_failed")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (TrainerConfig(), ("max_new_tokens", "kl_coef", "reward_fn")),
        (GRPOConfig(use_cpu=True), ("max_completion_length", "beta", "reward_funcs")),
        (
            GRPOConfig(use_cpu=True, max_new_tokens=8, beta=0.1),
            ("max_new_tokens", "beta", "reward_funcs"),
        ),
    ],
)
def test_settings_have_the_names_that_their_user_gave(
    config: TrainerConfig, names: tuple[str, ...]
) -> None:
    settings = ("sampling.max_new_tokens", "algorithm.kl_coef", "reward.functions")
    known = config.names()
    assert tuple(known[setting] for setting in settings) == names
    assert known["data.source"] == "train_dataset"
    assert "data.map" not in known, "it is an item of `settings`"


def test_ppo_may_have_one_answer_to_a_problem() -> None:
    assert TrainerConfig(trainer_type="ppo", num_generations=1).problems_per_step == 32


def test_minus_one_means_all_steps_as_in_trl() -> None:
    assert TrainerConfig(max_steps=-1).max_steps is None


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"), [(1, None, 12), (2, None, 25), (1, 5, 5), (1, 50, 50)]
)
def test_steps_of_a_run(epochs: int, max_steps: int | None, steps: int) -> None:
    """100 problems, 8 per step."""
    assert TrainerConfig(num_train_epochs=epochs, max_steps=max_steps).total_steps(100) == steps


@pytest.mark.parametrize("name", ["save_steps", "eval_steps"])
@pytest.mark.parametrize(
    ("interval", "steps"), [(1, 1), (1.0, 1), (7, 7), (0.5, 5), (0.11, 2), (0.99, 10), (0, 0)]
)
def test_an_interval_below_one_is_a_share_of_all_steps(
    name: str, interval: float, steps: int
) -> None:
    made = TrainerConfig(max_steps=10, **{name: interval}).to_config(100, 40, OUT)
    every = {"save_steps": made.checkpoint.every, "eval_steps": made.evaluation.every}
    assert every[name] == steps


def test_the_warm_up_is_a_share_of_all_steps_rounded_up() -> None:
    assert TrainerConfig(warmup_ratio=0.1).to_config(100, 0, OUT).optimizer.warmup_steps == 2
    assert (
        TrainerConfig(warmup_ratio=0.1, max_steps=30, num_train_epochs=9)
        .to_config(100, 0, OUT)
        .optimizer.warmup_steps
        == 3
    )
    assert TrainerConfig().to_config(100, 0, OUT).optimizer.warmup_steps == 0


def test_bf16_is_the_precision_of_the_update_on_a_gpu() -> None:
    low = TrainerConfig(use_gpu=True, bf16=True).to_config(100, 0, OUT)
    assert (low.trainer.device, low.model.dtype) == ("cuda", "bfloat16")
    high = TrainerConfig(use_gpu=True).to_config(100, 0, OUT)
    assert (high.trainer.device, high.model.dtype) == ("cuda", "float32")
