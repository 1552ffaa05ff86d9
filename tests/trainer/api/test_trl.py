"""TRL's arguments: each is mapped, accepted or refused with a reason, as the table in the
documentation says."""

import inspect
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from common.errors import ConfigError
from common.settings.algorithm import RECIPES
from common.settings.sections import DataSection
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.trl.trl_tables import table
from trainer.api.grpo import GRPOConfig, GRPOTrainer, RLOOConfig
from trainer.api.objects import lora_settings, optimizer_settings
from trainer.api.settings import TrainerConfig
from trainer.api.trl import ARGUMENTS, LOSSES, TRAINER, Effect

SIGNATURE = json.loads((ROOT / "tests" / "golden" / "trl_arguments.json").read_text())
DEFAULTS: dict[str, Any] = SIGNATURE["GRPOConfig"]
"""Every argument of TRL's GRPOConfig with its default, taken from TRL's source."""
OUT = Path("out")


def mapped(**fields: Any) -> Any:
    return TrainerConfig(**fields).to_config(100, 0, OUT)


def test_every_argument_of_trl_is_known() -> None:
    assert DEFAULTS.keys() <= ARGUMENTS.keys()
    assert ARGUMENTS.keys() - DEFAULTS.keys() <= {  # from earlier versions
        *("max_prompt_length", "overwrite_output_dir", "warmup_ratio", "group_by_length"),
        *("logging_dir", "save_safetensors", "use_mps_device", "use_ipex", "jit_mode_eval"),
        *("half_precision_backend", "fp16_backend", "fp16_opt_level", "dispatch_batches"),
        *("split_batches", "ray_scope", "tpu_num_cores", "include_inputs_for_metrics"),
        *("dataset_num_proc", "vllm_device", "vllm_dtype", "vllm_max_model_len"),
        *("vllm_enable_prefix_caching", "local_rollout_forward_batch_size"),
        *("missing_eos_penalty", "normalize_advantages", "normalize_reward", "whiten_rewards"),
        *("num_sample_generations", "reward_clip_range", "reward_model_path", "sft_model_path"),
        *("stop_token", "stop_token_id", "token_level_kl", "total_episodes"),
    }
    assert TRAINER.keys() < set(SIGNATURE["GRPOTrainer"])


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_every_default_of_trl_is_the_default_of_grpo_config(name: str) -> None:
    """Passing a default explicitly gives the same run as leaving it out."""
    if name in (
        "output_dir",
        "gradient_checkpointing",
    ):  # the first has no default here, the second changes no number
        return
    given = (
        GRPOConfig(**{name: DEFAULTS[name]}, use_gpu=False)
        if name != "use_cpu"
        else GRPOConfig(**{"use_cpu": True})
    )
    plain = GRPOConfig(use_gpu=False)
    assert given.to_config(100, 0, OUT) == plain.to_config(100, 0, OUT)


REFUSED = sorted(name for name, row in ARGUMENTS.items() if row.effect is Effect.REFUSED)
SAID = sorted(name for name, row in ARGUMENTS.items() if row.effect is Effect.WARNED)


def test_unsupported_arguments_are_refused_all_at_once_with_their_reasons() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**dict.fromkeys(REFUSED, "something else"))
    assert (caught.value.field or "").startswith(", ".join(REFUSED[:4]))
    for name in REFUSED:
        assert f"{name}: {ARGUMENTS[name].remark}" in caught.value.message


def test_everything_wrong_with_a_config_is_said_at_once() -> None:
    """Arguments that are refused, unknown or out of bounds, and fields that contradict others."""
    wrong = {"optim": "sgd", "top_p": 7, "learning_rat": 1, "eval_strategy": "best", "seed": "x"}
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**wrong)
    assert set((caught.value.field or "").split(", ")) == wrong.keys()
    assert "5 arguments are wrong" in caught.value.message
    assert "did you mean learning_rate?" in caught.value.message

    unfit = {
        "num_generations": 3,
        "loss_type": "luspo",
        "settings": {"trainer": {}, "data.path": 1},
    }
    with raises(
        ConfigError,
        field='per_device_train_batch_size, loss_type, settings["trainer"], settings["data.path"]',
    ):
        GRPOConfig(**unfit)


def test_everything_wrong_with_a_trainer_is_said_at_once() -> None:
    import torch

    class Own(GRPOTrainer):
        def compute_loss(self) -> None:
            """Would not be called."""

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError) as caught:
        Own(
            "model",
            7,
            GRPOConfig(**{"eval_strategy": "steps", "use_cpu": True}),
            [{"text": "no prompt"}],
            rollout_func=print,
            callbacks=[7],
            optimizers=(optimizer, None),
            tools=[7],
        )
    fields = ["rollout_func", "compute_loss", "optimizers", "tools", "callbacks", "reward_funcs"]
    assert (caught.value.field or "").split(", ") == [*fields, "train_dataset", "eval_strategy"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"beta": -1.0}, "beta"),
        ({"epsilon": "wide"}, "epsilon"),
    ],
)
def test_an_error_names_the_argument_as_it_was_given(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**arguments)
    assert caught.value.field == field


def test_an_unknown_argument_is_one_of_the_class_that_was_called() -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**{"learning_rte": 1e-5})
    assert caught.value.field == "learning_rte"
    assert "GRPOConfig" in caught.value.message


def test_the_arguments_of_another_trainer_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer("model", print, TrainingArguments("out"), [{"prompt": "a"}])
    assert caught.value.field == "args"
    assert "GRPOConfig" in str(caught.value.remedy)


def test_what_is_said_about_an_argument_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    config = GRPOConfig(**{"use_liger_kernel": True, "bf16": True, "use_cpu": True})
    config.beta = 0.1
    config.fp16 = True
    said = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert sorted(said) == ["bf16", "fp16", "use_liger_kernel"]


def test_a_constant_rate_has_no_warm_up_as_in_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"warmup_ratio": 0.5, "use_cpu": True}
    plain = GRPOConfig(**given, lr_scheduler_type="constant")
    assert plain.to_config(100, 0, OUT).optimizer.warmup_steps == 0
    assert "constant has no warm-up in transformers either" in caplog.text
    rising = GRPOConfig(**given, **{"lr_scheduler_type": "constant_with_warmup"})
    assert rising.to_config(100, 0, OUT).optimizer.warmup_steps > 0


def test_a_script_may_add_arguments_in_a_dataclass_of_its_own() -> None:
    @dataclass
    class Own(GRPOConfig):
        system_prompt: str | None = field(default=None)  # type: ignore[assignment]
        benchmarks: list[str] = field(default_factory=list, metadata={"help": "To run."})
        beta: float = field(default=0.3)

        def __post_init__(self) -> None:
            self.benchmarks = [*self.benchmarks, "last"]

    given: dict[str, Any] = {"system_prompt": "Think.", "benchmarks": ["first"], "use_cpu": True}
    made = Own("out", **given)
    assert (made.benchmarks, made.system_prompt) == (["first", "last"], "Think.")
    settings = made.to_config(100, 0, OUT)
    assert settings.algorithm.kl_coef == made.beta == 0.3
    assert settings.sampling.system_prompt == "", "the script puts it into its prompts"
    assert Own.script_fields == {"system_prompt", "benchmarks"}
    assert {"beta", "eval_strategy", "max_completion_length"} <= set(
        inspect.signature(GRPOConfig.__init__).parameters
    )


def test_arguments_without_effect_are_said_once_or_not_at_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unused = (Effect.NONE, Effect.WARNED)
    names = [name for name, argument in ARGUMENTS.items() if argument.effect in unused]
    given = {name: "x" for name in names if ARGUMENTS[name].convert is None}
    made = TrainerConfig(**given)
    made.changed(seed=1)
    (record,) = caplog.records
    assert sorted(re.findall(r"(\w+): ", record.getMessage())[1:]) == sorted(
        re.findall(r"(\w+): ", "; ".join(f"{name}: {ARGUMENTS[name].remark}" for name in SAID))
    )
    caplog.clear()
    TrainerConfig(**dict.fromkeys(SAID, False))
    GRPOConfig(**{"use_cpu": True})
    assert not caplog.records


def test_every_row_maps_to_a_field_or_a_setting() -> None:
    sections = mapped().model_dump()
    for name, argument in ARGUMENTS.items():
        section, dot, setting = argument.ours.partition(".")
        if argument.effect is Effect.USED:
            assert (
                setting in sections[section] if dot else argument.ours in TrainerConfig.model_fields
            ), name


@pytest.mark.parametrize("arguments", [ARGUMENTS, TRAINER], ids=["GRPOConfig", "GRPOTrainer"])
def test_the_table_in_the_documentation_matches_the_code(arguments: Any) -> None:
    assert table(arguments) in (ROOT / "docs" / "how-to" / "from-trl.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_trainer_type_and_a_loss_type(name: str) -> None:
    teacher = {"teacher.url": "http://127.0.0.1:1"} if name == "opd" else {}
    whole = mapped(trainer_type=name, settings=teacher).algorithm
    assert whole.name == name
    assert {key: getattr(whole, key) for key in RECIPES[name]} == RECIPES[name]
    loss = mapped(loss_type=name, settings=teacher).algorithm
    for key, value in LOSSES.get(name, RECIPES[name]).items():
        assert getattr(loss, key) == value


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({"beta": 0.3}, "algorithm.kl_coef", 0.3),
        ({"epsilon": 0.1}, "algorithm.clip_high", 0.1),
        ({"epsilon": 0.1, "epsilon_high": 0.28}, "algorithm.clip_high", 0.28),
        ({"epsilon_high": 0.28}, "algorithm.clip_low", 0.2),
        ({"trainer_type": "dapo", "epsilon": 0.1}, "algorithm.clip_high", 0.1),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.clip_high", 4.0),
        ({"num_iterations": 3}, "algorithm.update_epochs", 3),
        ({"trainer_type": "ppo"}, "algorithm.update_epochs", 2),
        ({"gradient_checkpointing": True}, "trainer.activation_checkpointing", True),
        ({"top_p": 0.9}, "sampling.top_p", 0.9),
        ({"top_k": 50}, "sampling.top_k", 50),
        ({"top_k": 0}, "sampling.top_k", None),
        ({"min_p": 0.1}, "sampling.min_p", 0.1),
        (
            {"temperature": 0.5, "generation_kwargs": {"temperature": 0.7, "do_sample": True}},
            "sampling.temperature",
            0.7,
        ),
        ({"generation_kwargs": {"stop_strings": "\n\n"}}, "sampling.stop", ["\n\n"]),
        ({"max_completion_length": 99}, "sampling.max_new_tokens", 99),
        ({"scale_rewards": False}, "algorithm.advantage", "group_centred"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "algorithm.advantage",
            "reward_normalised",
        ),
        ({"importance_sampling_level": "sequence"}, "algorithm.importance_level", "sequence"),
        ({"delta": 4.0}, "algorithm.dual_clip", 4.0),
        ({"adam_beta2": 0.95}, "optimizer.adam_betas", (0.9, 0.95)),
        ({"warmup_steps": 7}, "optimizer.warmup_steps", 7),
        ({"warmup_steps": 0.5}, "optimizer.warmup_steps", 6),
        ({"warmup_steps": 0.5, "max_steps": 40}, "optimizer.warmup_steps", 20),
        ({"warmup_steps": 0, "warmup_ratio": 0.5}, "optimizer.warmup_steps", 6),
        ({"max_steps": 40, "num_train_epochs": 2}, "trainer.max_steps", 40),
        ({"max_steps": -1, "num_train_epochs": 2}, "trainer.max_steps", None),
        ({"save_strategy": "no", "save_steps": 5}, "checkpoint.every", 0),
        ({"save_strategy": "steps", "save_steps": 5}, "checkpoint.every", 5),
        ({"eval_strategy": "no", "eval_steps": 5}, "evaluation.every", 0),
        ({"eval_strategy": "steps", "eval_steps": 5}, "evaluation.every", 5),
        ({"eval_strategy": "steps", "logging_steps": 7}, "evaluation.every", 7),
        (
            {"gradient_checkpointing": True, "activation_checkpointing": None},
            "trainer.activation_checkpointing",
            True,
        ),
        (
            {"loss_type": "bnpo", "gradient_accumulation_steps": 1},
            "algorithm.aggregation",
            "token_mean",
        ),
        (
            {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
            "algorithm.advantage",
            "reward_normalised",
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": False},
            "algorithm.advantage",
            "reward_normalised",
        ),
        ({"save_strategy": "no"}, "checkpoint.every", 0),
        ({"eval_strategy": "steps"}, "evaluation.every", 10),
        ({"report_to": ["tensorboard"]}, "trackers.names", ["tensorboard"]),
        ({"use_bias_correction_kl": True, "beta": 0.1}, "algorithm.kl_estimator", "k2"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "optimizer.warmup_steps", 3),
        ({"save_strategy": "epoch"}, "checkpoint.every", 12),
        ({"eval_strategy": "epoch", "eval_steps": 3}, "evaluation.every", 12),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, "evaluation.every", 3),
        ({"save_steps": 0.5, "max_steps": 7}, "checkpoint.every", 4),
        ({"num_train_epochs": 0.5}, "trainer.max_steps", 6),
        ({"num_train_epochs": 2.0}, "trainer.num_epochs", 2),
        ({"max_grad_norm": 0}, "optimizer.max_grad_norm", 1e9),
        ({"lr_scheduler_type": "constant_with_warmup"}, "optimizer.lr_schedule", "constant"),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            "optimizer.lr_schedule_args",
            {"min_lr_rate": 0.1},
        ),
        (
            {
                "learning_rate": 1e-5,
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 2e-6},
            },
            "optimizer.lr_schedule_args",
            {"min_lr": 2e-6},
        ),
        ({"steps_per_generation": 8}, "algorithm.mini_batches", 2),
        ({"steps_per_generation": 8}, "trainer.batch_size", 16),
        ({"steps_per_generation": 2}, "algorithm.mini_batches", 1),
        ({"generation_batch_size": 64}, "algorithm.mini_batches", 2),
        ({"evaluation_strategy": "steps", "eval_steps": 3}, "evaluation.every", 3),
        ({"eval_strategy": False, "eval_steps": 3}, "evaluation.every", 0),
        ({"model_init_kwargs": {"revision": "main"}}, "model.trust_remote_code", False),
        ({"loss_type": "cispo", "epsilon": 0.2}, "algorithm.clip_high", 4.0),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "model.trust_remote_code", True),
        ({"run_name": "first"}, "trackers.run_name", ""),
        ({"run_name": "first", "report_to": "tensorboard"}, "trackers.run_name", "first"),
    ],
)
def test_an_argument_sets_what_it_says(given: dict[str, Any], setting: str, value: Any) -> None:
    section, _, name = setting.partition(".")
    assert getattr(getattr(mapped(**given), section), name) == value


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
def test_eval_steps_alone_evaluate_nothing_as_in_transformers(kind: type[GRPOConfig]) -> None:
    alone = kind(eval_steps=5, use_gpu=False)
    assert alone.to_config(100, 8, OUT).evaluation.every == 0
    every = kind(**{"eval_strategy": "steps"}, eval_steps=5, use_gpu=False)
    assert every.to_config(100, 8, OUT).evaluation.every == 5
    assert every.changed(seed=1).to_config(100, 8, OUT).evaluation.every == 5


PAIRS = [
    {"max_steps": 10, "num_train_epochs": 1},
    {"max_steps": 10, "num_train_epochs": 1, "warmup_steps": 0.3},
    {"num_train_epochs": 2, "warmup_steps": 0.3},
    {"num_train_epochs": 2, "warmup_steps": 3},
    {"eval_strategy": "no", "eval_steps": 4},
    {"eval_strategy": "steps", "eval_steps": 4},
    {"eval_strategy": "steps", "logging_steps": 4},
    {"save_strategy": "no", "save_steps": 4},
    {"save_strategy": "steps", "save_steps": 4},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6},
]
"""Arguments of which one overrides or completes another."""


@pytest.mark.parametrize("given", PAIRS, ids=str)
def test_pairs_of_arguments_mean_what_they_mean_in_transformers(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """Compares with transformers' own arguments and trainer, on a data set that fills its
    batches."""
    import torch
    from transformers import Trainer, TrainingArguments

    plain = {
        "output_dir": str(tmp_path),
        "report_to": "none",
        "use_cpu": True,
        "per_device_train_batch_size": 8,
    }
    theirs = TrainingArguments(**plain | given)
    answers = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    rows = [{"x": i} for i in range(5 * answers)]
    trainer = Trainer(torch.nn.Linear(1, 1), theirs, train_dataset=rows, eval_dataset=rows)
    counts = trainer.set_initial_training_values(theirs, trainer.get_train_dataloader())
    steps = counts[-1]

    ours = GRPOConfig(**plain | given, num_generations=8)
    problems = 5 * answers // 8
    settings = ours.to_config(problems, 8, OUT)
    assert ours.problems_per_step * 8 == answers
    assert ours.total_steps(problems) == steps
    assert settings.optimizer.warmup_steps == theirs.get_warmup_steps(steps)
    assert settings.evaluation.every == (
        theirs.eval_steps if theirs.eval_strategy == "steps" else 0
    )
    assert settings.checkpoint.every == (
        theirs.save_steps if theirs.save_strategy == "steps" else 0
    )


def test_all_trackers_are_those_that_are_installed() -> None:
    assert "tensorboard" in mapped(report_to="all").trackers.names


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"beta": 0.1, "kl_coef": 0.2}, "beta", "0.1"),
        ({"loss_type": "vespo"}, "loss_type", "vespo"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "epsilon_high", "-0.8"),
        ({"loss_type": "gdpo", "trainer_type": "rloo"}, "loss_type", "gdpo"),
        ({"loss_type": "sapo", "clip_range": 0.1}, "clip_range", None),
        ({"scale_rewards": "batch"}, "scale_rewards", "batch"),
        ({"eval_strategy": "best"}, "eval_strategy", "best"),
        ({"shuffle_dataset": False}, "shuffle_dataset", "False"),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"power": 2}},
            "lr_scheduler_kwargs",
            None,
        ),
        ({"optim": "adafactor"}, "optim", "adafactor"),
        ({"model_init_kwargs": {"revision": "v2"}}, "model_init_kwargs", "{'revision': 'v2'}"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs", "{'num_beams': 4}"),
        ({"loss_type": "bnpo"}, "loss_type", "bnpo"),
        ({"loss_type": "luspo"}, "loss_type", "luspo"),
        (
            {"activation_checkpointing": True, "gradient_checkpointing": False},
            "activation_checkpointing",
            "True",
        ),
        ({"eval_strategy": "steps", "eval_steps": 2.5}, "eval_steps", "2.5"),
        ({"generation_kwargs": "stop"}, "generation_kwargs", "stop"),
        ({"reward_weight": [1]}, "reward_weight", "[1]"),
        ({"top_p": 0}, "top_p", "0"),
    ],
)
def test_contradictory_or_unknown_values_are_refused(
    given: dict[str, Any], field: str, value: str | None
) -> None:
    with raises(ConfigError, field=field, value=value) as caught:
        TrainerConfig(**given)
    assert caught.value.remedy


def test_arguments_are_read_and_set_by_the_names_of_trl() -> None:
    config = GRPOConfig(**{"use_cpu": True, "eval_strategy": "epoch", "beta": 0.1})
    assert (config.eval_strategy, config.beta, config.epsilon, config.fp16) == (
        *("epoch", 0.1),
        *(0.2, None),
    )
    config.num_generations = 4
    config.beta = 0.2
    assert config.num_generations == 4
    assert (config.kl_coef, config.beta, config.eval_strategy) == (0.2, 0.2, "epoch")
    assert config.changed(seed=1).eval_strategy == "epoch"
    with raises(ConfigError, field="repetition_penalty", value="1.1"):
        config.repetition_penalty = 1.1
    with pytest.raises(AttributeError, match="epsilom"):
        config.epsilom  # noqa: B018


def test_rloo_has_its_advantages() -> None:
    assert RLOOConfig(use_gpu=False).to_config(100, 0, OUT).algorithm.advantage == "leave_one_out"


def test_a_lora_config_becomes_the_settings_of_an_adapter() -> None:
    from peft import LoraConfig

    targets = {"v_proj", "q_proj"}
    given = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM"
    )
    settings = lora_settings(given, "model")
    names = ["q_proj", "v_proj"]
    assert settings == {
        "lora.rank": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.1,
        "lora.target_modules": names,
    }
    assert mapped(settings=settings).lora.rank == 8
    stable = lora_settings(
        LoraConfig(r=16, lora_alpha=8, use_rslora=True, target_modules="all-linear"), "model"
    )
    assert (stable["lora.alpha"], stable["lora.target_modules"]) == (
        32,
        [],
    )  # 8 / sqrt(16) = 32 / 16


def test_unsupported_adapters_are_refused_all_at_once() -> None:
    from peft import LoraConfig

    refused: dict[str, Any] = {
        "bias": "all",
        "init_lora_weights": "gaussian",
        "layers_to_transform": [0],
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q_proj": 4},
        "task_type": "SEQ_CLS",
        "use_dora": True,
    }
    with pytest.raises(ConfigError) as caught:
        lora_settings(LoraConfig(target_modules=["q_proj"], **refused), "model")
    named = {f"peft_config.{name}" for name in refused}
    assert set((caught.value.field or "").split(", ")) == named
    with raises(ConfigError, field="peft_config.target_modules"):
        lora_settings(LoraConfig(target_modules=".*proj"), "model")


def test_layers_that_are_not_named_are_those_of_peft(base_model: Path) -> None:
    from peft import LoraConfig

    made = lora_settings(LoraConfig(), str(base_model))
    assert made["lora.target_modules"] == ["q_proj", "v_proj"]


def test_an_adamw_gives_its_settings_and_others_are_refused() -> None:
    import torch

    weight = [torch.nn.Parameter(torch.zeros(1))]
    found = optimizer_settings(
        (torch.optim.AdamW(weight, lr=3e-4, betas=(0.8, 0.9), weight_decay=0.5), None)
    )
    assert found == {
        "learning_rate": 3e-4,
        "weight_decay": 0.5,
        "settings": {"optimizer.adam_betas": (0.8, 0.9)},
    }
    assert optimizer_settings((None, None)) == {}
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.AdamW(weight), lambda step: 1.0)
    for optimizers, value in [
        ((torch.optim.SGD(weight), None), "SGD {'eps': None, 'amsgrad': None}"),
        ((torch.optim.AdamW(weight, amsgrad=True), None), "AdamW {'amsgrad': True}"),
        ((None, schedule), "LambdaLR"),
    ]:
        with raises(ConfigError, field="optimizers", value=value):
            optimizer_settings(optimizers)


def test_the_table_of_verl_names_settings_that_exist() -> None:
    page = (ROOT / "docs" / "how-to" / "from-verl.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[2] for line in page.splitlines() if line.startswith("| ") and "`" in line
    ]
    assert len(rows) > 30
    sections = mapped().model_dump()
    for name in (word for row in rows for word in row.split("`")[1::2]):
        section, _, setting = name.partition(" ")[0].partition(".")
        assert setting in sections[section] or DataSection.model_fields.keys() & {setting}, name


def test_a_project_is_that_of_the_tracker_and_nothing_without_one() -> None:
    assert mapped(report_to="tensorboard", project="mine").trackers.project == "mine"
    nowhere: tuple[dict[str, Any], ...] = ({}, {"report_to": "none"}, {"report_to": []})
    for none in nowhere:
        assert mapped(project="mine", **none).trackers.names == []


def test_a_refused_argument_is_named_with_its_value() -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerConfig(lr_scheduler_type="greedy")
    assert (refused.value.field, refused.value.value) == ("lr_scheduler_type", "greedy")
