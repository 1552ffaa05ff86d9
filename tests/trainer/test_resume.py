"""A run resumes only as itself: from its own undamaged checkpoint, in a directory that no other run
is using."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.clients.rollout import RolloutClient
from common.errors import ConfigError
from common.process.run_lock import RunLock
from common.settings.config import Config, load
from common.wire.schemas import Completion
from learning.ranks import Ranks
from tests.support.batches.groups import save
from tests.support.errors import raises
from tests.support.paths import ROOT
from trainer import train_in_process
from trainer.observe.run_dir import Recorder, append_line, read_lines
from trainer.policy import checkpoint
from trainer.policy.identity import identity
from trainer.policy.policy import Policy
from trainer.rollouts.collector import CollectFailed


def retrained(model: Path) -> None:
    """Gives the model other weights of the same shapes."""
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: tensor + 0.01 for name, tensor in tensors.items()},
        model / "model.safetensors",
        {"format": "pt"},
    )


def shallower(model: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def other_template(model: Path) -> None:
    tokenizer = model / "tokenizer_config.json"
    text = json.loads(tokenizer.read_text())
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    )
    text.pop("chat_template", None)
    tokenizer.write_text(json.dumps(text))


def other_merges(model: Path) -> None:
    """The vocabulary stays, and so may the tokens of most texts."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["merges"][-1]
    path.write_text(json.dumps(content))


@pytest.fixture
def own(config: Config, tmp_path: Path) -> Config:
    """The settings of a small run with its own model directory."""
    shutil.copytree(config.model.name, tmp_path / "model")
    config.model.name = str(tmp_path / "model")
    return config


def resume(config: Config) -> Any:
    assert config.trainer.run_dir is not None
    return Policy.resume(config, Ranks(), config.trainer.run_dir)


def saved(config: Config, *steps: int) -> Path:
    assert config.trainer.run_dir is not None
    policy = Policy(config, Ranks())
    for policy.step in steps:
        path = save(policy, config.trainer.run_dir / "checkpoints")
    return path


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (retrained, "model.name"),
        (shallower, "model.name"),
        (other_template, "the tokenizer of model.name"),
        (other_merges, "the tokenizer of model.name"),
    ],
)
def test_another_model_in_place_of_the_first_is_refused(
    own: Config, change: Callable[[Path], None], name: str
) -> None:
    path = saved(own, 3)
    change(Path(own.model.name))
    with pytest.raises(
        ConfigError, match=rf"the content of {name}.*/model\) has changed since .*{path.name}"
    ) as e:
        resume(own)
    assert e.value.field == "model.name"
    assert "restore it, or start over: another run directory" in str(e.value.remedy)


def test_the_same_model_elsewhere_is_the_same_model(own: Config, tmp_path: Path) -> None:
    saved(own, 3)
    moved = Path(own.model.name).rename(tmp_path / "moved")
    own.model.name = str(moved)
    (moved / "README.md").write_text("new")
    described = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(
        json.dumps({**described, "transformers_version": "99"}, indent=4)
    )
    assert resume(own)[1].step == 3


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("sampling", "group_size", 3),
        ("trainer", "batch_size", 2),
        ("replay", "reuse_ratio", 0.5),
        ("lora", "rank", 4),
        ("algorithm", "advantage", "gae"),
        ("", "seed", 7),
        ("data", "source", "math"),
        ("data", "num_samples", 9),
    ],
)
def test_settings_that_the_checkpoint_depends_on_are_refused(
    config: Config, section: str, name: str, value: object
) -> None:
    saved(config, 3)
    holder = getattr(config, section) if section else config
    before = getattr(holder, name)
    setattr(holder, name, value)
    with raises(ConfigError, field=f"{section}.{name}".lstrip("."), value=str(value)) as error:
        resume(config)
    assert f" {before}," in error.value.message


def test_settings_that_may_change_are_accepted(config: Config) -> None:
    """The learning rate, the KL coefficient, the algorithm: everything the state does not depend
    on."""
    saved(config, 3)
    config.optimizer.learning_rate, config.algorithm.kl_coef, config.algorithm.clip_low = (
        0.5,
        0.7,
        0.1,
    )
    policy, state, _ = resume(config)
    assert (policy.step, policy.kl_coef, state.kl_coef) == (3, 0.7, 0.0)


def test_a_hub_model_is_identified_by_name_and_configuration(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Path(config.model.name)
    tokenizer = AutoTokenizer.from_pretrained(local)
    monkeypatch.setattr(
        "trainer.policy.identity.cached_file", lambda *_: str(local / "config.json")
    )
    monkeypatch.setattr("trainer.policy.identity.load_tokenizer", lambda _: tokenizer)
    facts = []
    for name in ("org/one", "org/one", "org/two"):
        config.model.name = name
        facts.append(identity(config)["model.name"])
    assert facts[0] == facts[1]
    assert facts[0][1] != facts[2][1]
    assert facts[0][0].startswith("org/one (")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "state/__0_0.distcp",
        "state/.metadata",
        "config.json",
        "trainer_state.json",
    ],
)
def test_one_flipped_byte_in_any_file_of_a_checkpoint_is_named_with_the_one_before(
    config: Config, name: str
) -> None:
    policy = Policy(config, Ranks())
    for parameter in policy.model.parameters():
        parameter.grad = parameter.detach().clone()
    policy.optimizer.step(1e-3)
    assert config.trainer.run_dir is not None
    for policy.step in (2, 3):
        path = save(policy, config.trainer.run_dir / "checkpoints")
    body = bytearray((path / name).read_bytes())
    place = body.index(b'"step": 3') + 8 if name == "trainer_state.json" else len(body) // 2
    body[place] ^= 1
    (path / name).write_bytes(body)
    with raises(ConfigError, code="checkpoint_changed", value=str(path)) as error:
        resume(config)
    assert name in error.value.message
    assert "remove it to continue from step_000002" in str(error.value.remedy)
    shutil.rmtree(path)
    assert resume(config)[1].step == 2


def test_a_damaged_checkpoint_is_neither_exported_nor_evaluated(config: Config) -> None:
    path = saved(config, 1)
    body = bytearray((path / "model.safetensors").read_bytes())
    body[-1] ^= 1
    (path / "model.safetensors").write_bytes(body)
    with raises(ConfigError, code="checkpoint_changed"):
        checkpoint.check_model(path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "groups.jsonl", "samples.jsonl"])
def test_lines_that_are_missing_before_a_resume_are_named(
    config: Config, tmp_path: Path, name: str, capsys: Any
) -> None:
    for file in ("metrics.jsonl", "groups.jsonl", "samples.jsonl"):
        for step in range(1, 7):
            append_line(tmp_path / file, {"step": step, "seconds": {}})
    lines = (tmp_path / name).read_text().splitlines(keepends=True)
    (tmp_path / name).write_text("".join(lines[:2] + lines[4:]))
    (tmp_path / "attempts.jsonl").write_text('{"run_id": "first", "step": 0}\n{"run_id": "cut')
    Recorder(tmp_path, config, Console(width=200), step=5, run_id="second")
    said = capsys.readouterr().out
    assert f"{name} lacks 2 of the steps 3 to 4, which the checkpoint has" in said
    assert "evaluations.jsonl lacks step 0" in said
    assert said.count("warning") == 2
    assert _run_ids(tmp_path) == ["first", "second"]


@pytest.fixture
def settings(base_model: Path, tmp_path: Path) -> Callable[..., Config]:
    def make(*more: str) -> Config:
        words = [
            *(
                "--config",
                str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
                "--model.name",
                str(base_model),
            ),
            *(
                "--trainer.run_dir",
                str(tmp_path / "run"),
                "--trainer.batch_size",
                "2",
                "--trainer.max_steps",
                "2",
            ),
            *("--evaluation.samples", "0", "--reward.workers", "1", "--sampling.group_size", "2"),
        ]
        return load([*words, *more], {})

    return make


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.integration
def test_a_run_that_is_refused_leaves_every_file_as_it_was(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    train_in_process(settings(), Console(quiet=True))
    append_line(
        tmp_path / "run" / "metrics.jsonl", {"step": 3, "lost": True}
    )  # a resume would remove this line
    before = files(tmp_path)
    for words in (
        ["--sampling.group_size", "4"],
        ["--replay.reuse_ratio", "0.5"],
        ["--seed", "3"],
        ["--data.num_samples", "9"],
    ):
        with pytest.raises(ConfigError):
            train_in_process(settings("--trainer.max_steps", "3", *words), Console(quiet=True))
        after = files(tmp_path)
        assert {path for path in before if before[path] != after.get(path)} <= {
            str(tmp_path / "run" / ".lock")
        } | {path for path in before if "/state/" in path}
    with (
        RunLock(tmp_path / "run", "other"),
        pytest.raises(ConfigError) as caught,
    ):
        train_in_process(settings(), Console(quiet=True))
    assert (caught.value.code, caught.value.field) == ("run_in_use", "trainer.run_dir")
    train_in_process(settings("--trainer.max_steps", "3"), Console(quiet=True))
    assert len(_run_ids(tmp_path / "run")) == 2


@pytest.mark.integration
def test_a_removed_replay_store_and_foreign_tokens_are_named(
    settings: Callable[..., Config],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_in_process(settings(), Console(quiet=True))
    assert all(
        line["id"].startswith(_run_ids(tmp_path / "run")[0]) for line in groups(tmp_path / "run")
    )
    shutil.rmtree(tmp_path / "run" / "state" / "replay")
    generate = RolloutClient.generate

    async def of_another_model(*words: Any, **more: Any) -> list[Completion]:
        found = await generate(*words, **more)
        found[1].token_ids = np.append(found[1].token_ids[1:], 99_999).astype(np.int32)
        return found

    monkeypatch.setattr(RolloutClient, "generate", of_another_model)
    with raises(CollectFailed, field="token_ids", value="99999"):
        train_in_process(settings("--trainer.max_steps", "3"), Console(quiet=True))
    assert (
        "the replay-buffer has stored 0 groups since it was made, and this run trained on 4"
        in caplog.text
    )


def groups(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "groups.jsonl").read_text().splitlines()
    return [group for line in lines for group in json.loads(line)["groups"]]


def _run_ids(directory: Path) -> list[str]:
    return [line["run_id"] for line in read_lines(directory / "attempts.jsonl")]
