"""Adapters of the embedded engine: of a head that shares its weight, and of a stated checksum."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from common.weights.checksums import checksum
from services.engine.adapters import AdapterRegistry, BadAdapter
from tests.support.engines.engines import write_model

_LAYER = "model.layers.0.self_attn.q_proj"


def _adapter(directory: Path, module: torch.nn.Module) -> Path:
    weights = dict(module.named_parameters()) | {"lm_head.weight": module.lm_head.weight}
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name in (_LAYER, "lm_head"):
        rows, columns = weights[f"{name}.weight"].shape
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_the_head_changes_no_embedding(tmp_path: Path, tied: bool) -> None:
    write_model(tmp_path / "model", seed=0)
    module = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", tie_word_embeddings=tied
    ).requires_grad_(False)
    if tied:
        assert module.lm_head.weight is module.model.embed_tokens.weight
    embeddings = module.model.embed_tokens.weight.clone()
    head = module.lm_head.weight.clone()
    layer = module.get_submodule(_LAYER).weight.clone()
    path = _adapter(tmp_path / "adapter", module)
    registry = AdapterRegistry(module)
    name = f"run-1@{checksum(path / 'adapter_model.safetensors')}"
    registry.load(name, path)

    with registry.only(name):
        assert torch.equal(module.model.embed_tokens.weight, embeddings)
        assert not torch.allclose(module.lm_head.weight, head)
        assert not torch.allclose(module.get_submodule(_LAYER).weight, layer)
        adapted = module(torch.tensor([[1, 2, 3]])).logits
        hidden = module.model(torch.tensor([[1, 2, 3]])).last_hidden_state
        torch.testing.assert_close(adapted, hidden @ module.lm_head.weight.T)
    assert torch.equal(module.lm_head.weight, head)
    assert torch.equal(module.get_submodule(_LAYER).weight, layer)


def test_other_weights_than_the_name_states_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=0)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model").requires_grad_(False)
    path = _adapter(tmp_path / "adapter", module)
    registry = AdapterRegistry(module)
    with pytest.raises(BadAdapter):
        registry.load(f"run-1@{'0' * 32}", path)
    assert registry.paths() == {}
