"""Saved models: in several safetensors files, which transformers and the loader can read, and with
checksums."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from learning import saving
from learning.loading import SafetensorsReader
from learning.ranks import Ranks


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_is_saved_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
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
    saving.Snapshot.take(saving.Contents.of(model), None, Ranks(), gathered=True).write(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert SafetensorsReader(tmp_path).shapes().keys() == saving.Contents.of(loaded).tensors.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_changed_byte_is_found_wherever_it_is_in_a_large_file(tmp_path: Path) -> None:
    """The file is read in pieces of 4 MiB: 10 MiB have a first, a middle and a last one."""
    size = 10 << 20
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    files = saving.checksums(tmp_path)
    assert files == {file.name: [size, zlib.crc32(content)]}
    assert saving.damaged(tmp_path, files) is None

    for place in (0, size // 2, size - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert saving.damaged(tmp_path, files) == file.name
