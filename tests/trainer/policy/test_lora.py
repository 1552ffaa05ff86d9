"""LoRA: what is trained, what is saved, and that engines sample from exactly the policy the trainer
computes."""

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.clients.rollout import RolloutClient
from common.errors import ConfigError
from common.process.storage import StorageFailed
from common.settings.config import Config, load
from learning.ranks import Ranks
from learning.saving import Contents
from services.data.tiny import problems
from tests.support.batches.groups import known, off_policy_groups, prepared, with_algorithm
from tests.support.errors import raises
from tests.support.paths import ROOT
from trainer import ModelEvaluator, OnlineRLTrainer, RewardFunction, TrainerConfig, train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.export import export
from trainer.policy.lora import merged_tensors
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_tokenizer
from trainer.policy.scoring import score_batch
from trainer.weights.adapters import AdapterPublisher, static_files
from trainer.weights.board import PublishFailed
from trainer.weights.host_copy import HostCopy
from trainer.weights.versions import Weights, write_version

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(3, 40)[None]


@pytest.fixture
def lora(config: Config) -> Config:
    """The settings of a small run with an adapter."""
    config.lora.rank, config.lora.alpha = 4, 8.0
    return config


def trained(config: Config, steps: int = 2) -> Policy:
    policy = Policy(config, Ranks())
    for _ in range(steps):
        policy.update(prepared(policy, off_policy_groups()))
    return policy


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def test_only_the_adapter_moves_and_a_new_one_changes_nothing(
    lora: Config, policy_dir: Path
) -> None:
    base = plain(policy_dir)
    policy = Policy(lora, Ranks())
    assert torch.equal(logits(policy.model), logits(base))
    policy.update(prepared(policy, off_policy_groups()))
    assert distance(logits(policy.model), logits(base)) > 1e-3
    after = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in policy.model.state_dict().items()
    }
    for name, tensor in base.state_dict().items():
        assert torch.equal(after.pop(name), tensor), name
    assert after
    assert all("lora_" in name for name in after)
    held = {name.rpartition(".")[0] for name in policy.optimizer.state_dict()}
    assert held == set(after)
    assert len(after) == 2 * 7 * base.config.num_hidden_layers


def test_the_reference_is_the_frozen_model_without_a_copy(lora: Config, policy_dir: Path) -> None:
    config = with_algorithm(lora, kl_coef=0.1)
    policy = trained(config)
    reference = Reference(policy)
    assert reference.scorer is not None
    assert reference.scorer.model is policy.model
    batch, full = (
        prepared(policy, off_policy_groups(), reference=reference),
        config.model_copy(deep=True),
    )
    full.lora.rank = 0
    expected = prepared(Policy(full, Ranks()), off_policy_groups())
    for found, right in zip(known(batch.ref_logprobs), known(expected.ref_logprobs), strict=True):
        np.testing.assert_array_equal(found, right)
    assert (
        distance(logits(policy.model), logits(plain(policy_dir))) > 1e-3
    )  # the adapter is on again


def test_dropout_applies_only_to_updates(lora: Config) -> None:
    lora.lora.dropout = 0.5
    policy = trained(with_algorithm(lora, rollout_correction="truncate", update_epochs=2))
    olds = [known(prepared(policy, off_policy_groups()).old_logprobs) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*olds, strict=True))
    batch = prepared(policy, off_policy_groups())
    first, second = (
        score_batch(policy.scorer, batch, policy.config, policy.ranks) for _ in range(2)
    )
    assert not any(
        np.array_equal(a, b) for a, b in zip(first, second, strict=True)
    )  # in training mode, dropout is on


def publish(policy: Policy, directory: Path) -> Path:
    config = policy.config
    static = static_files(config, policy.model, load_tokenizer(config.model), directory / "static")
    manifest = write_version(policy.weights(), static, directory, "run", 3)
    assert manifest.kind == ("adapter" if config.lora.publish == "adapter" else "model")
    return directory / "v000003"


def test_peft_loads_a_published_adapter_and_merging_gives_the_same_model(
    lora: Config, policy_dir: Path, tmp_path: Path
) -> None:
    policy = trained(lora)
    adapter = publish(policy, tmp_path / "adapter")
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(policy_dir)
    from peft import PeftModel  # slow to import, and every pytest process reads this file

    by_peft = PeftModel.from_pretrained(plain(policy_dir), adapter)
    assert distance(logits(by_peft), logits(policy.model)) < 1e-6
    lora.lora.publish = "merged"
    merged = publish(policy, tmp_path / "merged")
    assert set(load_file(merged / "model.safetensors")) == set(
        load_file(policy_dir / "model.safetensors")
    )
    assert distance(logits(plain(merged)), logits(policy.model)) < 1e-5


def test_a_frozen_model_in_bfloat16_is_merged_in_float32_and_rounded_once() -> None:
    base, low, high = (
        torch.full((2, 3), 1.0, dtype=torch.bfloat16),
        torch.full((1, 3), 0.25),
        torch.full((2, 1), 1.0),
    )
    state = {
        "m.q.base_layer.weight": base,
        "m.q.base_layer.bias": torch.zeros(2, dtype=torch.bfloat16),
        "m.q.lora_A.default.weight": low,
        "m.q.lora_B.default.weight": high,
        "head.weight": base,
    }
    merged = dict(merged_tensors(state.items(), 0.5))
    assert set(merged) == {"m.q.weight", "m.q.bias", "head.weight"}
    assert torch.equal(merged["m.q.weight"], torch.full((2, 3), 1.125, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match=r"m\.q\.weight has no adapter"):
        dict(merged_tensors(list(state.items())[:2], 0.5))


@pytest.mark.parametrize("modules", [["q_proj", "down_proj"], []])
def test_only_the_named_layers_are_adapted(lora: Config, modules: list[str]) -> None:
    lora.lora.target_modules = modules
    found = {name.split(".")[-2] for name, _ in Policy(lora, Ranks()).weights()}
    names = {name.split(".")[-3] for name, _ in Policy(lora, Ranks()).weights()}
    assert found == {"lora_A", "lora_B"}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == (set(modules) or every)


def test_a_missing_layer_is_refused_with_the_existing_ones(lora: Config) -> None:
    lora.lora.target_modules = ["c_attn"]
    with raises(ConfigError, field="lora.target_modules"):
        Policy(lora, Ranks())


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--lora.alpha", "8"], "lora.alpha"),
        (["--lora.publish", "merged"], "lora.publish"),
        (["--lora.rank", "4", "--trainer.weight_sync", "distributed"], "trainer.weight_sync"),
        (["--lora.rank", "4", "--lora.target_modules", "q_proj"], "lora.target_modules"),
        (["--lora.rank", "4", "--lora.target_modules", "k_proj"], "lora.target_modules"),
        (["--lora.rank", "4", "--lora.target_modules", "up_proj"], "lora.target_modules"),
        (
            [
                "--lora.rank",
                "4",
                "--algorithm.kl_coef",
                "0.1",
                "--algorithm.reference_refresh",
                "2",
            ],
            "algorithm.reference_refresh",
        ),
        (
            [
                "--lora.rank",
                "4",
                "--algorithm.kl_coef",
                "0.1",
                "--parallel.offload_reference",
                "true",
            ],
            "parallel.offload_reference",
        ),
    ],
)
def test_conflicting_settings_are_refused(words: list[str], field: str) -> None:
    with raises(ConfigError, field=field):
        load(words, {})


def test_an_adapter_is_named_only_after_it_was_published() -> None:
    client, seen = RolloutClient("rollout", "http://127.0.0.1:9"), list[tuple[str, int] | None]()

    class Watching:
        def publish(self, _weights: Weights, version: int) -> None:
            seen.append(client.adapter)
            if version == 2:
                raise PublishFailed("no rollout node serves it")

        def sleep(self) -> None: ...

        def wake(self) -> None: ...

    publisher = AdapterPublisher(Watching(), client, "run")
    publisher.publish([], 0)
    publisher.publish([], 1)
    with pytest.raises(PublishFailed):
        publisher.publish([], 2)
    assert seen == [None, ("run-v000000", 0), ("run-v000001", 1)]
    assert client.adapter == ("run-v000001", 1)


def test_a_merged_adapter_is_broadcast_as_a_whole_model(lora: Config, policy_dir: Path) -> None:
    """Every version has the layout of the first one, for which the engines made their buffers."""
    lora.lora.publish = "merged"
    policy, snapshot, model = (
        trained(lora, 1),
        HostCopy(),
        load_file(policy_dir / "model.safetensors"),
    )
    snapshot.fill(policy.weights(), 0)
    policy.update(prepared(policy, off_policy_groups()))
    snapshot.fill(policy.weights(), 1)
    names = [name for bucket in snapshot.buckets for name in bucket.names]
    assert sorted(names) == sorted(model)


@pytest.mark.slow
@pytest.mark.integration
def test_peft_is_imported_only_for_an_adapter() -> None:
    """The import takes seconds, and a run that trains all weights does not need it."""
    code = "import sys, trainer.__main__, trainer.api.online; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def settings(settings: Callable[..., Config]) -> Callable[..., Config]:
    """Makes the settings of a run of a few small steps with an adapter."""
    return partial(settings, "--lora.rank", "4", "--optimizer.learning_rate", "5e-3")


def run(config: Config) -> tuple[Path, list[dict[str, Any]]]:
    saved = train_in_process(config, Console(quiet=True))
    assert config.trainer.run_dir is not None
    return saved, read_lines(config.trainer.run_dir / "metrics.jsonl")


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("words", [("--lora.publish", "adapter"), ("--lora.publish", "merged")])
def test_the_engine_samples_from_the_policy_that_the_trainer_computes(
    settings: Callable[..., Config], base_model: Path, words: tuple[str, ...]
) -> None:
    config = settings(*words, "--evaluation.samples", "8", "--evaluation.pass_samples", "2")
    saved, lines = run(config)
    assert [line["staleness"] for line in lines] == [0, 0, 0]
    assert max(line["update"]["delta_logprob_current"] for line in lines) < 1e-5
    model: Any = plain(base_model)
    with torch.no_grad():
        before = model(IDS).logits
    assert (
        distance(logits(plain(saved)), before) > 1e-2
    )  # far more than rounding, so the engine used the adapter


@pytest.mark.integration
@pytest.mark.slow
def test_with_staleness_every_group_was_sampled_from_the_adapter_it_names(
    settings: Callable[..., Config],
) -> None:
    _, lines = run(settings("--trainer.max_staleness", "1", "--trainer.max_steps", "5"))
    assert max(line["staleness"] for line in lines) > 0
    assert not any(line["dropped"].get("generation") for line in lines)


@pytest.mark.integration
@pytest.mark.slow
def test_a_resumed_run_goes_on_as_an_unbroken_one(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    _, unbroken = run(settings("--trainer.max_steps", "4"))
    run(settings("--trainer.max_steps", "2", directory=tmp_path / "broken"))
    _, resumed = run(settings("--trainer.max_steps", "4", directory=tmp_path / "broken"))
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for a, b in zip(unbroken, resumed, strict=True):
        assert a["reward"] == b["reward"]
        assert a["update"] == pytest.approx(b["update"], abs=1e-4)
    for words in (
        ("--lora.alpha", "64"),
        ("--lora.target_modules", "q_proj"),
        ("--lora.rank", "0"),
    ):
        with raises(ConfigError, field=words[0].removeprefix("--")):
            run(settings(*words, directory=tmp_path / "broken"))


@pytest.mark.integration
def test_a_checkpoint_loads_is_evaluated_and_is_exported(
    settings: Callable[..., Config], base_model: Path, tmp_path: Path
) -> None:
    saved, _ = run(settings())
    assert (saved / "trainer_state.json").is_file()
    assert not (saved / "model.safetensors").exists()
    adapted = plain(saved)  # transformers finds the base model in adapter_config.json
    merged = export(saved, tmp_path / "merged")
    assert distance(logits(plain(merged)), logits(adapted)) < 1e-5
    assert not (merged / "adapter_config.json").exists()
    assert (
        AutoTokenizer.from_pretrained(merged)("1 + 1").input_ids
        == AutoTokenizer.from_pretrained(base_model)("1 + 1").input_ids
    )
    data = [problem for problem, _ in zip(problems("test"), range(8), strict=False)]
    rows = [{"question": problem.question, "answer": problem.solution} for problem in data]
    results = [
        ModelEvaluator(path, max_new_tokens=24, progress=False).evaluate(rows, Digits())
        for path in (saved, merged, base_model)
    ]
    assert results[0]["responses"] == results[1]["responses"]
    with raises(ConfigError, field="OUT"):
        export(saved, tmp_path / "merged")


def test_an_export_onto_a_full_disk_says_so_and_leaves_nothing(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(contents: Contents, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Contents, "write", full)
    with raises(StorageFailed, code="disk_full", field="OUT", value=str(tmp_path / "out")):
        export(policy_dir, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_whole_checkpoint_is_exported_in_another_precision(
    policy_dir: Path, tmp_path: Path
) -> None:
    out = export(policy_dir, tmp_path / "half", "bfloat16")
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    source = load_file(policy_dir / "model.safetensors")
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in tensors.items())
    with raises(ConfigError, field="CHECKPOINT"):
        export(tmp_path / "nothing", tmp_path / "out")


class Digits(RewardFunction):
    """Rewards the share of digits."""

    @property
    def name(self) -> str:
        return "digits"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in texts]


@pytest.mark.integration
def test_the_python_api_trains_an_adapter_and_saves_a_whole_model(
    base_model: Path, tmp_path: Path
) -> None:
    rows = [
        {"question": p.question, "answer": p.solution}
        for p, _ in zip(problems("train"), range(8), strict=False)
    ]
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        max_new_tokens=16,
        max_steps=2,
        kl_coef=0.01,
        output_dir=tmp_path / "run",
        verbose=False,
        settings={"lora.rank": 4, "lora.target_modules": ["q_proj", "v_proj"]},
    )
    trainer = OnlineRLTrainer(config, Digits(), rows)
    result = trainer.train()
    assert (result.checkpoint / "adapter_model.safetensors").is_file()
    adapted = logits(plain(result.checkpoint))
    model = trainer.save_model(tmp_path / "model")
    assert (model / "model.safetensors").is_file()
    assert not (model / "adapter_config.json").exists()
    assert distance(logits(plain(model)), adapted) < 1e-5
    assert trainer.evaluate(rows)["num_samples"] == 8
    shutil.rmtree(tmp_path / "run")
