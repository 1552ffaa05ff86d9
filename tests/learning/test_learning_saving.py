"""transformers and the loader can read a model that is saved in several safetensors files."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from learning import saving
from learning.loading import SafetensorsReader
from learning.ranks import Ranks


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_is_saved_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(saving, "_MAX_FILE_BYTES", 20_000)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(vocab_size=100, tie_word_embeddings=tied, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    saving.Snapshot.take(saving.Contents.of(model), None, Ranks(), alone=True).write(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert SafetensorsReader(tmp_path).shapes().keys() == saving.Contents.of(loaded).tensors.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
