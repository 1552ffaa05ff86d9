"""Many Tinker runs on one base: they do not touch one another, and come back from the disk as they
were, bit for bit."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.errors import InvalidInput
from common.weights.checksums import checksum
from learning.device import reproducible_numbers
from services.engine.adapters import AdapterRegistry
from tests.support.batches.tinker import learner, only, random_data
from trainer.tinker.interface import AdamParams, Datum, LoraSpec
from trainer.tinker.learner import RunLearner

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
DATA = only(random_data(), "weights")
OTHER = only(random_data(1), "logprobs", "advantages")
ADAM = AdamParams(learning_rate=1e-2)
SMALL = LoraSpec(rank=2, seed=5, train_mlp=False, train_unembed=False)


@pytest.fixture(scope="module")
def runs(policy_dir: Path) -> Iterator[RunLearner]:
    with reproducible_numbers(wanted=True):
        yield learner(policy_dir)


@pytest.fixture
def run(runs: RunLearner, request: pytest.FixtureRequest) -> str:
    """The name of a run with a step behind it and a gradient before it."""
    name = str(request.node.name)
    runs.create(name, LoraSpec(rank=4, seed=1))
    step(runs, name)
    runs.forward_backward(name, DATA, "cross_entropy", {})
    return name


def step(runs: RunLearner, run: str) -> dict[str, float]:
    """Makes a step with a loss of each kind; returns its metrics."""
    metrics = runs.forward_backward(run, DATA, "cross_entropy", {}).metrics
    metrics |= runs.forward_backward(run, OTHER, "ppo", {}).metrics
    return metrics | runs.optim_step(run, ADAM)


def state(runs: RunLearner, run: str, folder: Path) -> dict[str, bytes]:
    """Returns the files of a run."""
    runs.save(run, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_others_do_in_between_changes_no_bit(runs: RunLearner, tmp_path: Path) -> None:
    specs = {"all layers": LoraSpec(rank=4, seed=1), "attention": SMALL}
    alone: dict[str, list[dict[str, float]]] = {}
    for name, spec in specs.items():
        runs.create(f"{name} alone", spec)
        alone[name] = [step(runs, f"{name} alone") for _ in range(3)]
        assert alone[name][0] != alone[name][1], "it learns"

    beside: dict[str, list[dict[str, float]]] = {name: [] for name in specs}
    for name, spec in specs.items():
        runs.create(name, spec)
    for _ in range(3):
        for name in specs:
            beside[name].append(step(runs, name))
            runs.forward("attention", OTHER, "dro", {})
    assert beside == alone
    for name in specs:
        expected = state(runs, f"{name} alone", tmp_path / name / "alone")
        assert state(runs, name, tmp_path / name / "beside") == expected


def test_a_run_comes_back_with_its_optimiser_and_gradient(
    runs: RunLearner, run: str, tmp_path: Path
) -> None:
    before = state(runs, run, tmp_path / "saved")
    expected = [runs.optim_step(run, ADAM), step(runs, run)]
    after = state(runs, run, tmp_path / "after")

    runs.unload(run)
    with pytest.raises(KeyError):
        runs.forward(run, DATA, "cross_entropy", {})
    runs.load(run, tmp_path / "saved", optimizer=True)
    assert state(runs, run, tmp_path / "again") == before
    assert [runs.optim_step(run, ADAM), step(runs, run)] == expected
    assert state(runs, run, tmp_path / "later") == after

    # Without the optimiser: the weights, and nothing of the steps before.
    runs.load(run, tmp_path / "saved", optimizer=False)
    files = state(runs, run, tmp_path / "weights")
    assert files["adapter_model.safetensors"] == before["adapter_model.safetensors"]
    assert "optimizer.safetensors" not in files


@pytest.mark.parametrize("cut", [{"trainer__packing": "off"}, {"trainer__micro_batch_tokens": 15}])
def test_the_numbers_do_not_depend_on_the_passes(
    cut: dict[str, Any], runs: RunLearner, run: str, policy_dir: Path, tmp_path: Path
) -> None:
    other = learner(policy_dir, **cut)
    other.load(run, _saved(runs, run, tmp_path / "run"), optimizer=True)
    for data in (DATA, only(random_data(several=2), "weights")):
        expected = runs.forward_backward(run, data, "cross_entropy", {})
        found = other.forward_backward(run, data, "cross_entropy", {})
        for one, two in zip(expected.logprobs, found.logprobs, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
    other.optim_step(run, ADAM)
    norm = runs.optim_step(run, ADAM)
    assert other.forward(run, DATA, "cross_entropy", {}).metrics == pytest.approx(
        runs.forward(run, DATA, "cross_entropy", {}).metrics, rel=1e-4
    )
    assert norm["grad_norm:mean"] > 0


def test_gradients_add_up_until_a_step(runs: RunLearner, run: str, tmp_path: Path) -> None:
    once = load_file(_saved(runs, run, tmp_path / "once") / "optimizer.safetensors")
    runs.forward(run, DATA, "cross_entropy", {})
    runs.forward_backward(run, DATA, "cross_entropy", {})
    twice = load_file(_saved(runs, run, tmp_path / "twice") / "optimizer.safetensors")
    torch.testing.assert_close(twice["gradient"], 2 * once["gradient"], atol=0, rtol=0)
    runs.optim_step(run, ADAM)
    assert runs.optim_step(run, ADAM)["grad_norm:mean"] == 0


def _saved(runs: RunLearner, run: str, folder: Path) -> Path:
    runs.save(run, folder)
    return folder


def test_the_seed_decides_the_first_bits(runs: RunLearner, tmp_path: Path) -> None:
    for name, seed in (("one", 7), ("same", 7), ("another", 8)):
        runs.create(f"seed {name}", LoraSpec(rank=4, seed=seed))
        runs.export_adapter(f"seed {name}", tmp_path / name)
    files = {
        name: (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("one", "same", "another")
    }
    assert files["one"] == files["same"] != files["another"]


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (LoraSpec(3), {"self_attn", "mlp", "lm_head"}),
        (LoraSpec(3, train_unembed=False), {"self_attn", "mlp"}),
        (LoraSpec(3, train_attn=False, train_mlp=False), {"lm_head"}),
        (LoraSpec(3, train_attn=False, train_unembed=False), {"mlp"}),
    ],
)
def test_which_layers_are_trained(
    spec: LoraSpec, parts: set[str], runs: RunLearner, tmp_path: Path
) -> None:
    runs.create(str(spec), spec)
    step(runs, str(spec))
    step(runs, str(spec))
    found = runs.export_adapter(str(spec), tmp_path / "adapter")
    assert found == checksum(tmp_path / "adapter" / "adapter_model.safetensors")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    named = {part for part in ("self_attn", "mlp", "lm_head") if any(part in n for n in tensors)}
    assert named == parts
    assert all(bool(tensor.any()) for tensor in tensors.values()), "each has learned"
    assert {tensor.shape[0 if "lora_A" in name else 1] for name, tensor in tensors.items()} == {3}


def test_peft_computes_the_exported_policy(
    runs: RunLearner, run: str, policy_dir: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    runs.export_adapter(run, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32.0)
    base: Any = AutoModelForCausalLM.from_pretrained(
        policy_dir, dtype=torch.float32, tie_word_embeddings=False
    )
    base.lm_head.weight.data = base.model.embed_tokens.weight.data.clone()
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    outputs = runs.forward(run, DATA, "cross_entropy", {})
    for datum, found in zip(DATA, outputs.logprobs, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([list(datum.tokens)])).logits[0].log_softmax(-1)
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        np.testing.assert_allclose(found, logprobs.gather(1, targets)[:, 0], atol=1e-4)


def test_the_embedded_engine_reads_the_exported_adapter(
    runs: RunLearner, policy_dir: Path, tmp_path: Path
) -> None:
    runs.create("engine", replace(SMALL, train_mlp=True))
    runs.export_adapter("engine", tmp_path / "adapter")
    registry = AdapterRegistry(AutoModelForCausalLM.from_pretrained(policy_dir))
    registry.load("engine", tmp_path / "adapter")
    assert registry.paths() == {"engine": str(tmp_path / "adapter")}


def changed(datum: Datum, **inputs: Any) -> Datum:
    return Datum(datum.tokens, {**datum.inputs, **inputs})


SHORT = DATA[2]
PPO = only(random_data(), "logprobs", "advantages")[2]
NAN = np.array([0, np.nan, 0], np.float32)
BAD: dict[str, tuple[str, Callable[[RunLearner, str], Any]]] = {
    "loss": ("loss_fn", lambda runs, run: runs.forward_backward(run, DATA, "ppq", {})),
    "reinforce": (
        "loss_fn",
        lambda runs, run: runs.forward_backward(run, DATA, "stable_reinforce", {}),
    ),
    "setting": (
        "loss_fn_config.beta",
        lambda runs, run: runs.forward_backward(run, [PPO], "ppo", {"beta": 1.0}),
    ),
    "setting is NaN": (
        "loss_fn_config.beta",
        lambda runs, run: runs.forward_backward(run, [PPO], "dro", {"beta": np.nan}),
    ),
    "bounds": (
        "loss_fn_config.clip_low_threshold",
        lambda runs, run: runs.forward_backward(run, [PPO], "ppo", {"clip_low_threshold": 2.0}),
    ),
    "no data": ("data", lambda runs, run: runs.forward_backward(run, [], "cross_entropy", {})),
    "token": (
        "data[1].model_input",
        lambda runs, run: runs.forward_backward(
            run, [SHORT, Datum([1, 10_000, 2], SHORT.inputs)], "cross_entropy", {}
        ),
    ),
    "first token beyond": (
        "data[0].model_input",
        lambda runs, run: runs.forward_backward(
            run, [Datum([1, runs.vocabulary, 2], SHORT.inputs)], "cross_entropy", {}
        ),
    ),
    "too long": (
        "data[0].model_input",
        lambda runs, run: runs.forward_backward(
            run, [Datum([1] * 5000, SHORT.inputs)], "cross_entropy", {}
        ),
    ),
    "no tokens": (
        "data[0].model_input",
        lambda runs, run: runs.forward_backward(run, [Datum([], {})], "cross_entropy", {}),
    ),
    "no targets": (
        "data[0].loss_fn_inputs.target_tokens",
        lambda runs, run: runs.forward_backward(run, [Datum([1], {})], "cross_entropy", {}),
    ),
    "other length": (
        "data[0].loss_fn_inputs.target_tokens",
        lambda runs, run: runs.forward_backward(
            run, [Datum([1, 2], SHORT.inputs)], "cross_entropy", {}
        ),
    ),
    "target": (
        "data[0].loss_fn_inputs.target_tokens",
        lambda runs, run: runs.forward_backward(
            run, [changed(SHORT, target_tokens=np.array([1, -1, 2]))], "cross_entropy", {}
        ),
    ),
    "no advantages": (
        "data[0].loss_fn_inputs.logprobs",
        lambda runs, run: runs.forward_backward(run, [SHORT], "ppo", {}),
    ),
    "unknown input": (
        "data[0].loss_fn_inputs.mask",
        lambda runs, run: runs.forward_backward(run, [changed(PPO, mask=NAN)], "ppo", {}),
    ),
    "other shape": (
        "data[0].loss_fn_inputs.weights",
        lambda runs, run: runs.forward_backward(
            run, [changed(SHORT, weights=np.ones(2, np.float32))], "cross_entropy", {}
        ),
    ),
    "NaN": (
        "data[0].loss_fn_inputs.weights",
        lambda runs, run: runs.forward_backward(
            run, [changed(SHORT, weights=NAN)], "cross_entropy", {}
        ),
    ),
    "no mask": (
        "data[0].loss_fn_inputs.sequence_ratio_mask",
        lambda runs, run: runs.forward_backward(
            run, [changed(PPO, sequence_ratio_mask=np.zeros(3, np.float32))], "gspo", {}
        ),
    ),
    "infinite loss": (
        "data",
        lambda runs, run: runs.forward_backward(
            run,
            [PPO, changed(PPO, logprobs=np.full(3, -300, np.float32))],
            "importance_sampling",
            {},
        ),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_changes_nothing(
    case: str, runs: RunLearner, run: str, tmp_path: Path
) -> None:
    field, act = BAD[case]
    before = state(runs, run, tmp_path / "before")
    with pytest.raises(InvalidInput) as caught:
        act(runs, run)
    assert caught.value.field == field
    assert caught.value.remedy
    assert state(runs, run, tmp_path / "after") == before


def test_wrong_names_specs_and_files(runs: RunLearner, run: str, tmp_path: Path) -> None:
    folder = _saved(runs, run, tmp_path / "run")
    runs.create("wider", LoraSpec(rank=6))

    def fails(kind: type[Exception], act: Callable[..., object], *arguments: Any) -> None:
        with pytest.raises(kind):
            act(*arguments)

    fails(InvalidInput, runs.create, "wide", LoraSpec(rank=100_000))
    nothing = LoraSpec(4, train_attn=False, train_mlp=False, train_unembed=False)
    fails(InvalidInput, runs.create, "nothing", nothing)
    fails(FileNotFoundError, runs.load, run, tmp_path / "nowhere", True)
    fails(InvalidInput, runs.load, "wider", folder, True)

    before = state(runs, run, tmp_path / "before")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    fails(InvalidInput, runs.load, run, folder, True)
    weights.unlink()
    fails(InvalidInput, runs.load, run, folder, False)
    assert state(runs, run, tmp_path / "after") == before


def test_the_highest_rank_and_alpha_are_settings(
    runs: RunLearner, run: str, policy_dir: Path, tmp_path: Path
) -> None:
    folder = _saved(runs, run, tmp_path / "run")
    other = learner(policy_dir, lora__rank=4, lora__alpha=16.0)
    other.create("highest", LoraSpec(rank=4))
    with pytest.raises(InvalidInput):
        other.create("higher", LoraSpec(rank=5))
    with pytest.raises(InvalidInput) as caught:
        other.load("highest", folder, optimizer=True)
    assert "32.0" in (caught.value.remedy or "")


def test_a_folder_has_its_name_only_when_it_is_whole(
    runs: RunLearner, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(path: Path) -> None:
        synced.append(path.name)
        assert not (tmp_path / "run").exists() or path == tmp_path

    monkeypatch.setattr("trainer.tinker.run_files._sync", sync)
    runs.save(run, tmp_path / "run")
    assert synced[-2:] == ["run.partial", tmp_path.name]
    assert set(synced[:-2]) == {path.name for path in (tmp_path / "run").iterdir()}
