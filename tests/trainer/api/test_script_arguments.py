"""`TrlParser` and the classes of a script's arguments."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config


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
    ("words", "message"),
    [
        (["--learning_rat", "1"], "no such argument.*--learning_rat.*did you mean learning_rate"),
        (["--load_in_4bit"], "trained are float32.*field: load_in_4bit"),
        (["--lora_r", "many"], "field: --lora_r.*value: many"),
        (["--repetition_penalty", "1.5"], "field: repetition_penalty"),
        (["7"], "this is no argument"),
        (["--lora_r", "x", "--beta", "y", "--lora_x", "1"], "3 arguments are wrong"),
    ],
)
def test_arguments_that_nothing_reads_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config(words)


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
