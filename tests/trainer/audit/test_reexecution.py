"""A recorded step is re-executed bit for bit, and whatever is changed in its record is named.

The damage is done to the files directly, without the code that reads or writes them.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import msgpack
import numpy as np
import pytest

from common.errors import ConfigError
from common.process import watchdog
from services.environment.outcome import EnvironmentLost
from tests.support.environments.own_environments import RewardsTurns
from tests.support.errors import raises
from tests.support.runs.audits import audited, reexecuted
from tests.support.runs.in_process import quiet
from trainer.audit import __main__ as command
from trainer.audit import comparison, waits
from trainer.audit.comparison import Stage, StageOutcome
from trainer.audit.reexecution import StepReexecution
from trainer.start.in_process import train_in_process

pytestmark = pytest.mark.integration
STEP = 4
TURNS = "python:tests.support.environments.own_environments:RewardsTurns"
STAGES = tuple(stage for stage in comparison.STAGES if stage != "checkpoint")
"""What is compared unless stages are named."""
Document = dict[str, Any]


@pytest.fixture(scope="module")
def run_dir(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints after the second and the last."""
    return trained(tmp_path_factory, base_model, "audited")


@pytest.fixture(scope="module")
def run_of_episodes(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step of episodes with three answers each. Of the first, one is lost and replaced,
    and one dies and is tried again.
    """
    RewardsTurns.faults = [None, RuntimeError("lost"), EnvironmentLost("died")]
    words = [
        *("--environment.name", TURNS, "--environment.turns", "4", "--trainer.max_steps", "1"),
        *("--sampling.max_new_tokens", "32", "--rollout.max_context_tokens", "512"),
    ]
    return trained(tmp_path_factory, base_model, "episodes", *words)


def trained(folder: pytest.TempPathFactory, model: Path, name: str, *words: str) -> Path:
    directory = folder.getbasetemp() / name
    # `make mutants` runs these tests in many processes, none of which changes how a run is made.
    if not directory.exists():
        train_in_process(audited(model, directory, *words), quiet())
    return directory


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may damage."""
    return Path(shutil.copytree(run_dir, tmp_path / "copy", symlinks=True))


def outcomes(run_dir: Path, step: int = STEP, *stages: Stage) -> dict[Stage, StageOutcome]:
    told: list[StageOutcome] = []
    again = StepReexecution(run_dir, step, stages or STAGES, tell=told.append)
    found = again.run(again.ranks())
    assert told == found, "every outcome is told, once and in order"
    return {outcome.stage: outcome for outcome in found}


def first_difference(run_dir: Path, *stages: Stage) -> StageOutcome:
    found = outcomes(run_dir, STEP, *stages).values()
    return next(outcome for outcome in found if outcome.state == "differs")


def change_group(run_dir: Path, change: Callable[[Document], None], step: int = STEP) -> None:
    """Changes the first group of the step whose rewards differ."""
    path = run_dir / f"groups/step_{step:06d}.zip"
    with ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    for name in sorted(content):
        document = msgpack.unpackb(content[name])
        if len({completion["reward"] for completion in document["completions"]}) > 1:
            change(document)
            content[name] = msgpack.packb(document)
            break
    else:
        raise AssertionError("every group has equal rewards: use another step")
    with ZipFile(path, "w", ZIP_DEFLATED) as file:
        for name, body in content.items():
            file.writestr(name, body)


def change_line(run_dir: Path, step: int, change: Callable[[Document], None]) -> None:
    """Changes the line of a step in the audit record."""
    path = run_dir / "audit.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "step" and line["step"] == step]
    change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_start(run_dir: Path, change: Callable[[Document], None]) -> None:
    """Changes the line of the run's start in the audit record."""
    path = run_dir / "audit.jsonl"
    start, *steps = map(json.loads, path.read_text().splitlines())
    assert start["kind"] == "start"
    change(start)
    path.write_text("".join(json.dumps(line) + "\n" for line in [start, *steps]))


def add_attempt(run_dir: Path, step: int, section: str, name: str, value: object) -> None:
    """Makes an attempt of its own, with another setting, of the one that made `step`."""
    path = run_dir / "audit.jsonl"
    start, *steps = map(json.loads, path.read_text().splitlines())
    other = json.loads(json.dumps(start)) | {"run_id": "another attempt", "step": step - 1}
    settings = other["config"][section] if section else other["config"]
    assert settings[name] != value
    settings[name] = value
    for line in steps:
        if line["step"] == step:
            line["run_id"] = other["run_id"]
    path.write_text("".join(json.dumps(line) + "\n" for line in [start, other, *steps]))


def flip(body: bytes, at: int) -> bytes:
    """Flips the lowest bit of one byte."""
    changed = bytearray(body)
    changed[at] ^= 1
    return bytes(changed)


def other_digit(text: str) -> str:
    return ("0" if text[0] != "0" else "1") + text[1:]


def test_every_stage_of_a_step_comes_out_again(run_dir: Path) -> None:
    found = outcomes(run_dir)
    wanted = [stage for stage in STAGES if stage != "episodes"]
    assert list(found) == wanted
    # The run is not `reproducible`: the batch of a token may change its last bits.
    assert found["completions"].state in ("equal", "close")
    for stage in wanted:
        if stage != "completions":
            assert found[stage].state == "equal", found[stage]
    assert "step_000002 and 1 recorded update" in found["weights"].detail


def test_a_step_before_every_checkpoint_begins_with_the_initial_model(
    copy: Path, base_model: Path
) -> None:
    shutil.rmtree(copy / "checkpoints")
    found = outcomes(copy, 2, "weights", "gradients", "new weights")
    assert f"the initial model {base_model} and 1 recorded update" in found["weights"].detail
    assert {outcome.state for outcome in found.values()} == {"equal"}


def test_reward_functions_of_a_caller_are_not_compared_and_the_rest_is(copy: Path) -> None:
    """Their names, which the record has with their weights, are those of objects."""

    def change(start: Document) -> None:
        start["given"] = ["rewards"]
        start["config"]["reward"]["functions"] = ["brief", {"name": "right", "weight": 2.0}]

    change_start(copy, change)
    found = outcomes(copy)
    assert found.pop("rewards").state == "not compared"
    assert {outcome.state for outcome in found.values()} <= {"equal", "close"}


def test_one_byte_of_a_token_is_named(copy: Path) -> None:
    def change(document: Document) -> None:
        completion = document["completions"][1]
        completion["token_ids"] = flip(completion["token_ids"], 0)

    change_group(copy, change)
    found = first_difference(copy)
    assert found.stage == "completions"
    assert "completion 1, token 0" in found.where
    assert found.expected.startswith("token ")
    assert found.expected.partition(",")[0] != found.found.partition(",")[0]


def test_another_token_is_named_and_not_the_rounding_before_it(copy: Path) -> None:
    """The run is not `reproducible`: the last bits of a log-probability say nothing."""

    def change(document: Document) -> None:
        completion = max(document["completions"], key=lambda each: len(each["token_ids"]))
        completion["logprobs"] = flip(completion["logprobs"], 0)
        completion["token_ids"] = flip(completion["token_ids"], 4 * 3)

    change_group(copy, change)
    found = first_difference(copy)
    assert found.stage == "completions"
    assert found.where.endswith(", token 3")
    assert found.expected.partition(",")[0] != found.found.partition(",")[0]


@pytest.mark.parametrize("torch_version", ["", "0.1"])
def test_a_changed_record_of_the_step_before_is_named_as_such(
    copy: Path, torch_version: str
) -> None:
    """With another torch, whose rounding may change the bits of the weights, too."""

    def change(document: Document) -> None:
        completion = document["completions"][0]
        completion["token_ids"] = flip(completion["token_ids"], 0)

    change_group(copy, change, STEP - 1)
    if torch_version:
        packages = {"torch": torch_version}
        change_start(copy, lambda start: start["setup"]["packages"].update(packages))
    found = first_difference(copy)
    assert found.stage == "weights"
    assert "the record of step 3 (groups/step_000003.zip" in found.where
    assert "completion 0" in found.where


def test_one_byte_of_a_log_probability_is_named(copy: Path) -> None:
    def change(document: Document) -> None:
        completion = document["completions"][1]
        values = np.frombuffer(completion["logprobs"], "<f4")
        least_likely = int(values.argmin())
        # In the exponent: four times the value, or a quarter of it.
        completion["logprobs"] = flip(completion["logprobs"], 4 * least_likely + 3)

    change_group(copy, change)
    found = first_difference(copy)
    assert found.stage == "completions"
    assert "completion 1" in found.where


def test_a_reward_is_named_with_what_the_function_says(copy: Path) -> None:
    told: list[float] = []

    def change(document: Document) -> None:
        completion = document["completions"][2]
        told.append(completion["reward"])
        completion["reward"] = 1.0 - completion["reward"]

    change_group(copy, change)
    found = first_difference(copy)
    (reward,) = told
    assert found.stage == "rewards"
    assert "completion 2" in found.where
    assert found.expected.startswith(f"{1.0 - reward}")
    assert found.found.startswith(f"{reward}")
    # The advantages were computed from the true reward.
    assert outcomes(copy)["advantages"].state == "differs"


@pytest.mark.parametrize(
    ("name", "stage"), [("advantages", "advantages"), ("trainer_logprobs", "logprobs")]
)
def test_one_bit_of_what_the_trainer_computed_is_named(copy: Path, name: str, stage: Stage) -> None:
    def change(document: Document) -> None:
        completion = document["completions"][0]
        completion[name] = flip(completion[name], 0)

    change_group(copy, change)
    found = first_difference(copy)
    assert found.stage == stage
    assert "completion 0, trained token 0" in found.where


def test_a_prompt_is_named(copy: Path) -> None:
    change_group(copy, lambda document: document.update(prompt="What is 1 + 1?"))
    found = first_difference(copy, "prompts")
    assert found.stage == "prompts"
    assert "1 + 1" in found.expected
    assert "1 + 1" not in found.found


@pytest.mark.parametrize(
    ("field", "step", "stage"),
    [
        ("gradients", STEP, "gradients"),
        ("weights", STEP, "new weights"),
        ("weights", STEP - 1, "weights"),
    ],
)
def test_a_checksum_is_named(copy: Path, field: str, step: int, stage: Stage) -> None:
    def change(line: Document) -> None:
        value = line[field]
        line[field] = [other_digit(value[0])] if isinstance(value, list) else other_digit(value)

    change_line(copy, step, change)
    found = first_difference(copy)
    assert found.stage == stage
    assert found.expected != found.found


def test_one_byte_of_a_weight_is_named(copy: Path) -> None:
    path = copy / "checkpoints/step_000002/model.safetensors"
    path.write_bytes(flip(path.read_bytes(), -100))
    found = outcomes(copy)
    assert found["weights"].state == "differs"
    assert "step_000002/model.safetensors" in found["weights"].where
    assert list(found) == ["prompts", "weights"], "with other weights, nothing else is compared"


def test_a_damaged_or_missing_record_is_an_error_that_names_the_file(copy: Path) -> None:
    path = copy / f"groups/step_{STEP:06d}.zip"
    whole = path.read_bytes()
    path.write_bytes(flip(whole, 100))
    with raises(ConfigError, field="trainer.run_dir", value=str(path)):
        outcomes(copy)
    path.unlink()
    with raises(ConfigError, field="trainer.keep_groups_mb", value=str(path)):
        outcomes(copy)
    path.write_bytes(whole)

    change_line(copy, STEP, lambda line: line["groups"].reverse())
    with raises(ConfigError, field=f"groups/step_{STEP:06d}.zip"):
        outcomes(copy)
    with raises(ConfigError, field="--step", value="9"):
        outcomes(copy, 9)
    change_line(copy, STEP, lambda line: line.update(weights=3))
    with raises(ConfigError, field="trainer.run_dir", value=str(copy / "audit.jsonl")):
        outcomes(copy)
    (copy / "audit.jsonl").unlink()
    with raises(ConfigError, field="trainer.audit"):
        outcomes(copy)


def test_other_rounding_is_no_difference_on_another_machine(copy: Path) -> None:
    # The engine of this run was not deterministic: one that is rounds differently.
    change_start(copy, lambda start: start["config"].update(reproducible=True))
    assert outcomes(copy, STEP, "completions")["completions"].state == "differs"

    change_start(copy, lambda start: start["setup"]["packages"].update(torch="0.1"))
    found = outcomes(copy, STEP, "completions")["completions"]
    assert found.state == "close"
    assert "because torch was 0.1 and is " in found.detail


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("", "reproducible", True),
        ("environment", "turn_discount", 0.5),
        ("reward", "functions", [{"name": "math", "weight": 2.0}]),
        ("optimizer", "learning_rate", 0.5),
    ],
)
def test_an_update_with_other_settings_is_not_executed_with_these(
    copy: Path, section: str, name: str, value: object
) -> None:
    add_attempt(copy, STEP - 1, section, name, value)
    with pytest.raises(ConfigError, match=rf"step 3 was made with .*{name}"):
        outcomes(copy, STEP, "weights")


def test_settings_that_change_no_update_may_differ(copy: Path) -> None:
    add_attempt(copy, STEP - 1, "evaluation", "every", 7)
    assert outcomes(copy, STEP, "weights")["weights"].state == "equal"


def test_the_command_says_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To load the libraries takes minutes on a busy machine."""
    monkeypatch.setattr(waits, "_SAY_EVERY_S", 0.001)
    for rank, is_told in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        said = ""
        with waits.waits_told():
            watchdog.at("reading the record")
            if not is_told:
                time.sleep(0.05)
                said = capsys.readouterr().err
            while is_told and "s: reading the record\n" not in said:
                said += capsys.readouterr().err
        assert bool(said) == is_told


def test_the_command_names_the_first_stage_that_differs(copy: Path) -> None:
    change_group(copy, lambda document: document["completions"][0].update(reward=0.5))
    status, printed = reexecuted(copy, STEP, "--stages", "prompts", "rewards")
    assert status == 1
    assert printed.splitlines()[-1] == "the first stage that differs: rewards"
    assert "expected      0.5" in printed


def test_a_misspelt_stage_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([str(run_dir), "--step", str(STEP), "--stages", "reward"])
    assert ended.value.code == 2
    assert "did you mean rewards?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command.main([str(run_dir), "--certify", "file"])
    assert ended.value.code == 2
    assert "--seed" in capsys.readouterr().err
    with raises(ConfigError, field="--step", value=None):
        command.main([str(run_dir)])


def test_episodes_come_out_again_and_what_was_changed_in_one_is_named(
    run_of_episodes: Path, tmp_path: Path
) -> None:
    found = outcomes(run_of_episodes, 1)
    states = {stage: outcome.state for stage, outcome in found.items()}
    assert states.pop("completions") in ("equal", "close")
    assert set(states.values()) == {"equal"}
    assert list(states) == [stage for stage in STAGES if stage != "completions"]
    assert found["episodes"].detail.startswith("16 episodes of ")
    assert found["rewards"].detail.startswith("16 rewards ")

    def of_environment(completion: Document) -> None:
        mask = np.frombuffer(completion["mask"], "<i4")
        at = 4 * int(np.flatnonzero(mask == 0)[0])
        completion["token_ids"] = flip(completion["token_ids"], at)

    def of_model(completion: Document) -> None:
        completion["token_ids"] = flip(completion["token_ids"], 0)

    def of_end(completion: Document) -> None:
        completion["turns"][-1]["reward"] += 1.0

    def of_reward(completion: Document) -> None:
        completion["reward"] += 1.0

    changes: dict[Callable[[Document], None], tuple[Stage, str]] = {
        of_environment: ("episodes", "before answer 1, token "),
        of_model: ("episodes", "before answer 1, token "),
        of_end: ("rewards", "episode 0 of group"),
        of_reward: ("rewards", "episode 0 of group"),
    }
    for number, (change, (stage, where)) in enumerate(changes.items()):
        copied = Path(shutil.copytree(run_of_episodes, tmp_path / str(number), symlinks=True))
        change_group(copied, lambda document: change(document["completions"][0]), 1)  # noqa: B023
        named = outcomes(copied, 1, "episodes", "rewards")
        assert [each for each, outcome in named.items() if outcome.state == "differs"][:1] == [
            stage
        ]
        assert where in named[stage].where
        assert named[stage].expected != named[stage].found
