"""Every setting is declared once and can be set in four places; every typo is refused by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings.config import Config, from_mapping, load, names
from common.settings.sources import SHORT_NAMES
from tests.support.errors import raises


def refused(argv: list[str] | None = None, env: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(argv or [], env or {})
    return caught.value


def in_file(folder: Path, text: str) -> list[str]:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


def test_defaults_are_what_the_job_group_promises() -> None:
    config = load([], {})
    assert (config.model.name, config.trainer.num_epochs, config.trainer.batch_size) == (
        "Qwen/Qwen2.5-0.5B-Instruct",
        3,
        4,
    )
    assert (config.data.port, config.reward.port, config.replay.port) == (8000, 8002, 8003)
    assert (config.rollout.router_port, config.rollout.engine_port) == (30000, 30001)


def test_later_places_win(tmp_path: Path) -> None:
    file = in_file(tmp_path, "seed: 1\ntrainer: {batch_size: 11, num_epochs: 11, max_steps: 11}\n")
    env = {"RLHF_TRAINER__BATCH_SIZE": "12", "RLHF_TRAINER__NUM_EPOCHS": "12"}
    config = load([*file, "--trainer.batch_size", "13"], env)
    trainer = config.trainer
    assert (trainer.batch_size, trainer.num_epochs, trainer.max_steps, config.seed) == (
        13,
        12,
        11,
        1,
    )
    assert config.evaluation.samples == Config().evaluation.samples
    assert load(["--seed=2", *file], {}).seed == 2
    assert load([], {"RUN_CONFIG": file[1]}).seed == 1
    assert load([f"--config={file[1]}"], {"RUN_CONFIG": "/absent"}).seed == 1


def test_short_names_set_their_settings() -> None:
    env = {
        "MODEL_NAME": "tiny",
        "NUM_EPOCHS": "5",
        "BATCH_SIZE": "6",
        "MAX_STEPS": "7",
        "SEED": "8",
    }
    config = load([], env | {"STATE_DIR": "here", "RUN_DIR": "there"})
    assert (config.model.name, config.trainer.num_epochs, config.trainer.batch_size) == (
        "tiny",
        5,
        6,
    )
    assert (config.trainer.max_steps, config.seed) == (7, 8)
    assert (config.state_dir, config.trainer.run_dir) == (Path("here"), Path("there"))
    assert load([], {"MODEL_NAME": ""}).model.name == Config().model.name
    assert len(SHORT_NAMES) == 7


def test_the_long_name_wins_over_the_short_one() -> None:
    assert load([], {"BATCH_SIZE": "5", "RLHF_TRAINER__BATCH_SIZE": "6"}).trainer.batch_size == 6


def test_lists_and_unset_values(tmp_path: Path) -> None:
    assert load([], {"RLHF_ROLLOUT__ENGINE_ARGS": '["--a", "b c"]'}).rollout.engine_args == [
        "--a",
        "b c",
    ]
    assert load(
        in_file(tmp_path, "{optimizer: {adam_betas: [0.8, 0.9]}, trainer: {max_steps: null}}"), {}
    ).optimizer.adam_betas == (0.8, 0.9)
    assert load(in_file(tmp_path, ""), {}) == load([], {})


def test_commas_make_a_list_wherever_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("trackers:\n  names: wandb, mlflow\n")
    places = [
        load(["--trackers.names", "wandb,mlflow"], {}),
        load([], {"RLHF_TRACKERS__NAMES": "wandb, mlflow"}),
        load(["--config", str(tmp_path / "settings.yaml")], {}),
        from_mapping({"trackers.names": "wandb,mlflow"}),
    ]
    assert [config.trackers.names for config in places] == [["wandb", "mlflow"]] * 4
    assert load([], {"RLHF_TRACKERS__NAMES": ""}).trackers.names == []
    # The commas of a pattern are its own.
    pattern = {"name": "format", "required": "x{2,3}"}
    with raises(ConfigError, field="reward.functions.format.required", value="x{2,3}"):
        from_mapping({"reward.functions": [pattern]})


def test_a_typo_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    assert refused(in_file(tmp_path, "trainer: {bach_size: 4}")).field == "trainer.bach_size"
    assert refused(in_file(tmp_path, "trainr: {batch_size: 4}")).field == "trainr"
    assert refused(env={"RLHF_TRAINER__BACH_SIZE": "4"}).field == "RLHF_TRAINER__BACH_SIZE"
    assert refused(env={"RLHF_TRAINR__BATCH_SIZE": "4"}).field == "RLHF_TRAINR__BATCH_SIZE"
    assert (
        refused(env={"RLHF_TRAINER__BATCH_SIZE__MORE": "4"}).field
        == "RLHF_TRAINER__BATCH_SIZE__MORE"
    )
    assert refused(["--trainer.bach_size", "4"]).field == "--trainer.bach_size"
    assert refused(["extra"]).field == "extra"


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--trainer.batch_size", "0"], "trainer.batch_size"),
        (["--trainer.batch_size", "many"], "trainer.batch_size"),
        (["--optimizer.learning_rate", "nan"], "optimizer.learning_rate"),
        (["--optimizer.learning_rate", "inf"], "optimizer.learning_rate"),
        (["--data.port", "65536"], "data.port"),
        (["--sampling.group_size", "0"], "sampling.group_size"),
        (["--replay.reuse_ratio", "1"], "replay.reuse_ratio"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_a_wrong_value_is_named(argv: list[str], field: str) -> None:
    error = refused(argv)
    assert error.field == field
    assert error.value is not None
    assert argv[1] in error.value
    assert error.remedy
    name = "RLHF_" + field.upper().replace(".", "__")
    assert refused(env={name: argv[1]}).field == field


@pytest.mark.parametrize(
    "text",
    ["optimizer: {learning_rate: .nan}", "optimizer: {learning_rate: .inf}", "max_body_mb: [1]"],
)
def test_a_wrong_value_in_a_file_is_named(tmp_path: Path, text: str) -> None:
    assert refused(in_file(tmp_path, text)).field in ("optimizer.learning_rate", "max_body_mb")


def test_conflicting_settings_are_refused() -> None:
    argv = [
        "--rollout.engine",
        "embedded",
        "--rollout.max_context_tokens",
        "64",
        "--sampling.max_new_tokens",
        "64",
    ]
    assert refused(argv).field == "sampling.max_new_tokens"


_STALE = "--trainer.max_staleness=1"


@pytest.mark.parametrize(
    ("argv", "named", "remedy"),
    [
        (["--rollout.device=cpu"], "rollout.device cpu", "rollout.engine embedded"),
        (
            ["--environment.name=agent:./play"],
            "environment.name agent:./play",
            "an environment class",
        ),
        (["--teacher.url=http://h:1"], "teacher.url http://h:1", "leave teacher.url empty"),
        (
            ["--reward.functions", "[{name: judge, url: 'http://h', model: m}]"],
            "judge",
            "leave it out",
        ),
        (
            ["--reward.functions", "[{name: reward_model, model: m}]"],
            "reward_model",
            "leave it out",
        ),
        ([_STALE, "--trainer.when_stale=train"], "trainer.when_stale train", "when_stale wait"),
        ([_STALE, "--trainer.when_stale=drop"], "trainer.when_stale drop", "when_stale wait"),
        ([_STALE, "--algorithm.dynamic_sampling=true"], "dynamic_sampling True", "max_staleness 0"),
        ([_STALE, "--data.curriculum=difficulty"], "curriculum difficulty", "max_staleness 0"),
        ([_STALE, "--replay.reuse_ratio=0.5"], "replay.reuse_ratio 0.5", "max_staleness 0"),
    ],
)
def test_what_would_make_two_runs_differ_is_refused(
    argv: list[str], named: str, remedy: str
) -> None:
    load(argv, {})
    message = str(refused([*argv, "--reproducible", "true"]))
    assert named in message
    assert "reproducible" in message
    assert remedy in message


def test_settings_that_repeat_are_allowed() -> None:
    several = ["--algorithm.dynamic_sampling", "true", "--data.curriculum", "difficulty"]
    load([*several, "--replay.reuse_ratio", "0.5", "--reproducible", "true"], {})
    load([_STALE, "--environment.name", "python", "--reproducible", "true"], {})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    absent = ["--config", str(tmp_path / "absent.yaml")]
    for words in (absent, in_file(tmp_path, "trainer: ["), in_file(tmp_path, "- 1")):
        error = refused(words)
        assert (error.field, error.value) == ("--config", words[1])
    (tmp_path / "run.yaml").write_bytes(b"model: {name: \xff}")
    assert refused(["--config", str(tmp_path / "run.yaml")]).field == "--config"
    error = refused(["--config"])
    assert (error.field, error.value) == ("--config", None)


def test_an_environment_that_cannot_be_read_is_named() -> None:
    assert refused(env={"RLHF_ROLLOUT__ENGINE_ARGS": "[a"}).field == "RLHF_ROLLOUT__ENGINE_ARGS"
    error = refused(env={"RLHF_TRAINER": "x", "RLHF_TRAINER__BATCH_SIZE": "4"})
    assert (error.field, "is a section" in error.message) == ("RLHF_TRAINER", True)


def shown(capsys: pytest.CaptureFixture[str], option: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load([option], {}, "python -m anything")
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_settings_that_matter_and_where_the_others_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, "--help")
    listed = {name for name in names() if f"--{name} " in text}
    assert {
        "seed",
        "model.name",
        "algorithm.name",
        "trainer.batch_size",
        "sampling.group_size",
    } <= listed
    assert {
        "environment.name",
        "teacher.url",
        "sampling.chat_template_kwargs",
        "trainer.activation_checkpointing",
    } <= listed
    assert 35 <= len(listed) <= 45
    assert f"{len(names()) - len(listed)} more settings: --help-all" in text
    assert "usage: python -m anything [--config FILE]" in text


def test_help_all_lists_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help-all")
    assert all(f"--{name} " in text for name in names())
    assert "Completions per prompt" in text


@pytest.mark.integration
def test_every_program_has_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.data", "--help"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, "--help-all" in done.stdout) == (0, True), done.stderr


@pytest.mark.integration
def test_a_program_ends_with_status_2_and_the_name_of_the_setting() -> None:
    arguments = [sys.executable, "-m", "services.data", "--data.prot", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "--data.prot" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_configuration_survives_the_round_trip_as_json() -> None:
    config = load(["--trainer.max_steps", "3", "--data.source", "tiny"], {})
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_an_option_keeps_the_rest_of_its_section_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("optimizer: {learning_rate: 0.25, weight_decay: 0.5}\n")
    config = load(
        ["--config", str(path), "--trainer.max_steps", "3"],
        {"RLHF_OPTIMIZER__WEIGHT_DECAY": "0.75"},
    )
    assert (
        config.optimizer.learning_rate,
        config.optimizer.weight_decay,
        config.trainer.max_steps,
    ) == (0.25, 0.75, 3)


def test_the_state_directory_is_in_the_run_directory_unless_set() -> None:
    group = {"SKYPILOT_JOBGROUP_NAME": "math"}
    for env, run_dir, state_dir in (
        ({}, "runs/local", "runs/local/state"),
        (group, "runs/math", "runs/math/state"),
        ({**group, "RUN_DIR": "there"}, "there", "there/state"),
        ({"RUN_DIR": "there", "STATE_DIR": "here"}, "there", "here"),
    ):
        config = load([], env)
        assert (str(config.trainer.run_dir), str(config.state_dir)) == (run_dir, state_dir)
    assert str(Config().state_dir) == "runs/local/state"
