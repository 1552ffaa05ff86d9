"""Multimodal checkpoints trained on text: their language model learns, the rest is kept bit for bit."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from common.settings.config import Config, from_mapping
from learning.ranks import Ranks
from learning.saving import Snapshot
from services.engine.adapters import AdapterRegistry
from services.engine.model import Model
from services.engine.weights import load_into
from tests.support.batches.groups import off_policy_groups, prepared
from tests.support.batches.sharding import One, arguments, run_cases
from tests.support.models.every_type import write_type
from trainer.policy.export import export
from trainer.policy.policy import Policy
from trainer.policy.scorer import load_tokenizer
from trainer.weights.adapters import static_files
from trainer.weights.comparison import Checksums
from trainer.weights.layouts import parts_of
from trainer.weights.versions import write_version

pytestmark = pytest.mark.integration

MTP = "mtp.layers.0.mlp.experts.0.gate_proj.weight"
"""A head that predicts further tokens, named like a part of a mixture."""
SGLANG: dict[str, tuple[str, str]] = {
    "qwen3_5": (r"^model\.language_model\.", "model."),
    "qwen3_5_moe": (r"^model\.language_model\.", "model."),
    "gemma3": (r"^", ""),
    "gemma4": (r"^model\.", ""),
    "mistral3": (r"^", ""),
    "llama4": (r"^", ""),
}
"""How `load_weights` of SGLang 0.5.21 makes the name of a parameter of one in a file, for what is not
fused: `srt/models/{qwen3_5,gemma3_mm,gemma4_mm,llava,mllama4}.py`. Every name must begin as here:"""
SGLANG_PARAMETERS = {
    "qwen3_5": ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."),
    "qwen3_5_moe": ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."),
    "gemma3": ("language_model.model.",),
    "gemma4": ("language_model.",),
    "mistral3": ("language_model.model.", "language_model.lm_head."),
    "llama4": ("language_model.model.", "language_model.lm_head."),
}
"""Beginnings of the names of parameters of the classes there."""
TOKENS = torch.arange(20, 60)[None]


def is_of_text(name: str) -> bool:
    return name.startswith(("language_model.", "model.language_model.", "lm_head."))


def written(kind: str, directory: Path) -> dict[str, Tensor]:
    """Writes a checkpoint whose other parts are bfloat16; returns the tensors in its file."""
    write_type(kind, directory)
    file = directory / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(file) | {MTP: torch.randn(8, 8)}
    for name, tensor in tensors.items():
        if not is_of_text(name):
            tensors[name] = tensor.bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    (directory / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return tensors


def settings(directory: Path, **more: Any) -> Config:
    return from_mapping(
        {
            "model.name": str(directory),
            "optimizer.learning_rate": 1e-2,
            "optimizer.warmup_steps": 0,
            "rollout.engine": "embedded",
            "rollout.max_context_tokens": 64,
            "sampling.max_new_tokens": 16,
            **{name.replace("__", "."): value for name, value in more.items()},
        }
    )


def trained(config: Config) -> Policy:
    policy = Policy(config, Ranks())
    policy.update(prepared(policy, off_policy_groups()))
    policy.model.eval()
    return policy


def scores(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.scorer.next_scores(TOKENS, None)


def reference_scores(model: Any) -> Tensor:
    """Log-probabilities by transformers' class for text and images."""
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None])[..., 0]


def reloaded(directory: Path) -> Any:
    model, found = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert set(found["unexpected_keys"]) <= {MTP}
    return model


def assert_kept(before: dict[str, Tensor], directory: Path) -> None:
    """Asserts that only tensors of the language model differ, and that all of it is there."""
    after: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys()
    assert MTP in after
    for name, tensor in before.items():
        if is_of_text(name):
            continue
        assert after[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(after[name], tensor)
    changed = [name for name in before if is_of_text(name) and not before[name].equal(after[name])]
    assert len(changed) > 10


@pytest.mark.parametrize("kind", SGLANG)
def test_the_language_model_is_trained_and_the_rest_is_kept(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = written(kind, tmp_path / "model")
    whole = reloaded(tmp_path / "model")
    config = settings(tmp_path / "model")
    with caplog.at_level(logging.INFO, "learning.untrained_parts"):
        policy = Policy(config, Ranks())
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "learning.untrained_parts"
    ]
    assert "mtp.layers (1)" in said
    assert (scores(policy) - reference_scores(whole)).abs().max() < 1e-5

    policy.update(prepared(policy, off_policy_groups()))
    policy.model.eval()
    checkpoint = tmp_path / "checkpoint"
    policy.snapshots(gathered=True)["."].write(checkpoint)
    load_tokenizer(config.model).save_pretrained(checkpoint)
    assert_kept(before, checkpoint)
    assert (scores(policy) - reference_scores(reloaded(checkpoint))).abs().max() < 1e-5
    assert type(reloaded(checkpoint)) is type(whole)
    (served,) = Model(checkpoint, 64).score(TOKENS.tolist())
    assert (scores(policy)[0] - torch.tensor(served.logprobs)).abs().max() < 1e-5
    assert (checkpoint / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'

    resumed = Policy(config, Ranks(), checkpoint)
    resumed.model.eval()
    assert torch.equal(scores(resumed), scores(policy))
    resumed.snapshots(gathered=True)["."].write(tmp_path / "again")
    assert_kept(before, tmp_path / "again")

    out = export(checkpoint, tmp_path / "exported", "bfloat16")
    exported = reloaded(out)
    assert (scores(policy) - reference_scores(exported)).abs().max() < 0.1
    assert_kept({name: tensor.bfloat16() for name, tensor in before.items()}, out)


@pytest.mark.parametrize("kind", SGLANG)
def test_what_is_published_has_the_names_that_engines_load(kind: str, tmp_path: Path) -> None:
    before = written(kind, tmp_path / "model")
    config = settings(tmp_path / "model")
    policy = trained(config)
    sent = dict(policy.weights())
    assert sent.keys() == {name for name in before if is_of_text(name)}

    pattern, replacement = SGLANG[kind]
    for name, tensor in sent.items():
        parameter = re.sub(pattern, replacement, name)
        assert parameter.startswith(SGLANG_PARAMETERS[kind])
        assert parts_of(parameter, sent) == [name]
        # An engine's checksum is compared with that of what was sent.
        checksums = Checksums(on_gpu=False)
        digest = checksums._digest(tensor)
        assert checksums.compare(sent, [{parameter: digest}]).wrong == []
        assert checksums.compare(sent, [{parameter: "other"}]).wrong == [parameter]

    static = static_files(config, policy.model, load_tokenizer(config.model), tmp_path / "static")
    write_version(sent.items(), static, tmp_path / "weights", "run", 1)
    version = tmp_path / "weights/v000001"
    engine = Model(tmp_path / "model", 64)
    load_into(engine.module, version)
    (served,) = engine.score(TOKENS.tolist())
    assert (scores(policy)[0] - torch.tensor(served.logprobs)).abs().max() < 1e-5
    assert json.loads((version / "config.json").read_text())["model_type"] == kind


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "llama4"])
def test_an_adapter_is_for_the_whole_model(kind: str, tmp_path: Path) -> None:
    before = written(kind, tmp_path / "model")
    config = settings(tmp_path / "model", lora__rank=4, lora__alpha=8.0)
    policy = trained(config)
    adapter = tmp_path / "adapter"
    policy.snapshots(gathered=True)["."].write(adapter)
    load_tokenizer(config.model).save_pretrained(adapter)

    from peft import PeftModel

    whole = reloaded(tmp_path / "model")
    adapted = PeftModel.from_pretrained(whole, adapter)
    misfits = adapted.load_adapter(adapter, "default")
    assert not misfits.unexpected_keys
    assert not misfits.missing_keys
    assert (scores(policy) - reference_scores(adapted)).abs().max() < 1e-5
    inside = [name for name, module in adapted.named_modules() if hasattr(module, "lora_A")]
    assert all("language_model" in name for name in inside)

    out = export(adapter, tmp_path / "merged")
    assert_kept(before, out)
    assert (scores(policy) - reference_scores(reloaded(out))).abs().max() < 1e-5

    engine = Model(tmp_path / "model", 64)
    registry = AdapterRegistry(engine.module)
    registry.load("a", adapter)
    registry.merge("a")
    (own,) = engine.score(TOKENS.tolist())
    assert (scores(policy)[0] - torch.tensor(own.logprobs)).abs().max() < 1e-5

    resumed = Policy(config, Ranks(), adapter)
    resumed.model.eval()
    assert torch.equal(scores(resumed), scores(policy))
    assert isinstance(resumed.snapshots(gathered=True)["."], Snapshot)


def test_heads_for_further_tokens_of_a_text_model_are_kept(tmp_path: Path) -> None:
    model = write_type("deepseek_v3", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    own = load_file(file)
    layer = model.config.num_hidden_layers
    further = {
        f"model.layers.{layer}.{name}": torch.randn(4, 4).bfloat16()
        for name in ("eh_proj.weight", "mlp.experts.0.gate_proj.weight", "embed_tokens.weight")
    }
    save_file(own | further, file, metadata={"format": "pt"})

    policy = trained(settings(tmp_path / "model"))
    assert dict(policy.weights()).keys() == own.keys()
    policy.snapshots(gathered=True)["."].write(tmp_path / "checkpoint")
    kept = load_file(tmp_path / "checkpoint/kept.safetensors")
    assert kept.keys() == further.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in further.items())
    _, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", output_loading_info=True
    )
    assert not found["missing_keys"]


def test_ranks_that_share_the_language_model_keep_the_rest(tmp_path: Path) -> None:
    before = written("gemma3", tmp_path / "model")
    one = One(tmp_path / "model", tmp_path)
    case = {"settings": arguments(tmp_path / "model"), "updates": 2, "save": "two"}
    again = {"settings": arguments(tmp_path / "model"), "updates": 1}
    run_cases(2, tmp_path, {"two": case, "on": again | {"resume": "two"}})
    one.check(tmp_path, "on", 2)
    (checkpoint,) = (tmp_path / "two/checkpoints").iterdir()
    assert_kept(before, checkpoint)
    reloaded(checkpoint)
