"""`TrlParser` and the classes of a script's arguments."""

import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

import rlhf_math
from common.errors import ConfigError
from tests.support.errors import raises
from trainer import (
    DatasetMixtureConfig,
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    RLOOConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
)
from trainer.api.scripts import DatasetConfig
from trainer.api.trl import RENAMED


def test_arguments_override_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "learning_rate: 1.0e-5\nseed: 3\nuse_peft: true\nlora_target_modules: [q_proj]\n"
    )
    words = ["--config", str(file), "--seed=4", "--dataset_name", "org/rows", "--use_cpu"]
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script, config, model = parser.parse_args_and_config(words)
    assert (script.dataset_name, script.dataset_train_split) == ("org/rows", "train")
    assert (config.learning_rate, config.seed, config.use_gpu) == (1e-5, 4, False)
    lora = get_peft_config(model)
    assert (lora.r, lora.target_modules) == (16, {"q_proj"})
    assert get_peft_config(ModelConfig()) is None


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--learning_rat", "1"], "--learning_rat", "1"),
        (["--load_in_4bit"], "load_in_4bit", "True"),
        (["--lora_r", "many"], "--lora_r", "many"),
        (["--repetition_penalty", "1.5"], "repetition_penalty", "1.5"),
        (["7"], "arguments", "7"),
        (["--lora_r", "x", "--beta", "y", "--lora_x", "1"], "beta, --lora_r, --lora_x", None),
    ],
)
def test_arguments_that_nothing_reads_are_refused(
    words: list[str], field: str, value: str | None
) -> None:
    with raises(ConfigError, field=field, value=value) as caught:
        TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config(words)
    if field == "--learning_rat":
        assert "did you mean learning_rate?" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "line 2: the key seed stands twice.*field: --config"),
        ("- seed", "not a mapping of arguments.*field: --config"),
        (None, "No such file.*field: --config"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        TrlParser(GRPOConfig).parse_args_and_config(["--config", str(tmp_path / "recipe.yaml")])


def test_words_become_what_the_classes_declare() -> None:
    """A single word of a list, a `no` that YAML reads as False, and words for other programs."""

    @dataclass
    class Own(GRPOConfig):
        callbacks: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.callbacks = [*self.callbacks, "last"]

    words = ["--callbacks", "first", "--evaluation_strategy", "no", "--num_processes", "8"]
    parser = TrlParser((Own, ModelConfig), prog="script")
    config, _, others = parser.parse_args_and_config(words, return_remaining_strings=True)
    assert (config.callbacks, config.eval_strategy) == (["first", "last"], "no")
    assert others == ["--num_processes"]


@dataclass
class Further(GRPOConfig):
    further: int = 3


GIVEN: list[tuple[type[GRPOConfig], dict[str, Any]]] = [
    (GRPOConfig, {}),
    (GRPOConfig, {"adam_beta1": 0.8, "scale_rewards": "none", "beta": 0.04}),
    (GRPOConfig, {"trainer_type": "dapo", "epsilon": 0.2}),
    (GRPOConfig, {"settings": {"algorithm.entropy_coef": 0.1}, "warmup_steps": 0.5}),
    (RLOOConfig, {"eval_strategy": "epoch", "generation_kwargs": {"top_k": 7}}),
    (Further, {"further": 5, "loss_type": "cispo", "epsilon_high": 5.0}),
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"adam_beta1": 0.9, "scale_rewards": "group", "max_steps": 7},
    {"beta": 0.2, "learning_rate": 3e-4},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_a_config_can_be_replaced_and_listed_as_a_dataclass(
    kind: type[GRPOConfig], given: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = kind(use_cpu=True, **given)
    found: Any = replace(config, **changes)  # type: ignore[type-var]
    expected = kind(use_cpu=True, **{**given, **changes})
    assert found.model_dump() == expected.model_dump()
    assert found.to_config(100, 0, Path()) == expected.to_config(100, 0, Path())
    listed = asdict(found)
    for name in ("learning_rate", "beta", "max_completion_length", "scale_rewards"):
        assert listed[name] == getattr(expected, name)
    assert listed.get("further") == getattr(expected, "further", None)
    assert copy.deepcopy(config) == config


def test_replaced_settings_are_all_settings() -> None:
    config = GRPOConfig(use_cpu=True, adam_beta1=0.8, settings={"trainer.audit": True})
    found: Any = replace(config, settings={"algorithm.entropy_coef": 0.1})  # type: ignore[type-var]
    assert found.settings["optimizer.adam_betas"] == (0.8, 0.999)
    assert found.settings["algorithm.entropy_coef"] == 0.1
    assert "trainer.audit" not in found.settings


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig, Further])
def test_the_parser_of_transformers_is_refused_with_the_one_that_works(kind: Any) -> None:
    with raises(ConfigError, field=kind.__name__):
        HfArgumentParser((ScriptArguments, kind))


def test_the_name_of_a_model_is_for_model_config(base_model: Path, tmp_path: Path) -> None:
    """A script loads the model, and gives the object beside the config."""
    words = ["--model_name_or_path", str(base_model), "--use_cpu", "--output_dir", str(tmp_path)]
    config, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config(words)
    assert model.model_name_or_path == str(base_model)
    assert "model_name_or_path" not in config.model_fields_set
    (alone,) = TrlParser(GRPOConfig).parse_args_and_config(words)
    assert alone.model_name_or_path == str(base_model)


@pytest.mark.parametrize(
    ("fractions", "streaming"),
    [([], False), ([0.5, None], False), ([0.5, -0.5], False), ([0.0], False), ([0.5, 0.5], True)],
)
def test_a_mixture_that_cannot_be_made_is_refused_before_anything_is_loaded(
    fractions: list[float | None], streaming: bool
) -> None:
    parts = [DatasetConfig(path="no/such/data", fraction=fraction) for fraction in fractions]
    with raises(ConfigError, code="config", field="datasets"):
        get_dataset(DatasetMixtureConfig(parts, streaming=streaming))


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = [{"prompt": "1+1="}] * 24
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer("some/model", lambda completions, **_: [0.0], None, rows)
    assert caught.value.field == "WORLD_SIZE"


def test_fine_tuning_is_named_where_scripts_look_for_it() -> None:
    for name in ("SFTConfig", "SFTTrainer"):
        with pytest.raises(ImportError, match="rlhf sft"):
            getattr(rlhf_math, name)


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_earlier_names_are_those_of_today(name: str) -> None:
    values = {"evaluation_strategy": "no", "exp_name": "x", "vllm_guided_decoding_regex": None}
    value = values.get(name, False if name.startswith("normalize") else 1)
    config = GRPOConfig(**{"use_cpu": True, name: value})
    assert getattr(config, RENAMED[name]) == value


def test_all_bad_entries_of_generation_kwargs_are_named_at_once() -> None:
    entries = {"pad_token_id": 0, "eos_token_id": [2, 3], "stop_token_ids": [4], "top_k": -1}
    config = GRPOConfig(use_cpu=True, generation_kwargs=entries)
    assert config.settings["sampling.stop_token_ids"] == [2, 3, 4]
    assert config.top_k is None
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(use_cpu=True, generation_kwargs=entries | {"num_beams": 4, "no_such": "x"})
    assert "no num_beams=4, no_such=x, but" in caught.value.message


@pytest.mark.parametrize("value", [-1, 0, None])
def test_a_top_k_that_is_off_samples_from_all(value: int | None) -> None:
    assert GRPOConfig(use_cpu=True, top_k=value).top_k is None
