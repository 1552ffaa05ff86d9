"""What an update recomputes is decided by the memory of the GPU, once, for every rank."""

import json
import logging
from pathlib import Path

import pytest

from common.settings.config import Config, load
from learning.fitting import fitted
from learning.ranks import Ranks

_QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


class _OnGpu(Ranks):
    """A rank with a GPU of 40 GB."""

    gpu_bytes = property(lambda _: 40 * 10**9)


def _config(directory: Path, shape: dict[str, object], *words: str) -> Config:
    (directory / "config.json").write_text(json.dumps(shape))
    return load(["--model.name", str(directory), *words], {})


def test_the_choice_is_logged_once_with_its_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, _QWEN_05B, "--trainer.micro_batch_tokens", "16384")
    with caplog.at_level(logging.INFO):
        settings = fitted(config, _OnGpu(), config.model.name)
    decided = (settings.trainer.activation_checkpointing, settings.parallel.reshard_after_forward)
    assert decided == ("selective", False), "41.6 GB without recomputing, 33.6 GB with it"
    (line,) = caplog.messages
    assert line.startswith("activation_checkpointing selective, reshard_after_forward false, ")
    assert line.endswith(" GB of 40.0, by the estimate")


def test_a_cpu_and_settings_that_are_set_decide_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, _QWEN_05B)
    explicit = ["--trainer.activation_checkpointing", "false"]
    explicit += ["--parallel.reshard_after_forward", "true", "--trainer.micro_batch_tokens", "512"]
    with caplog.at_level(logging.INFO):
        assert fitted(config, Ranks(), config.model.name) is config
        config = _config(tmp_path, _QWEN_05B, *explicit)
        assert fitted(config, _OnGpu(), config.model.name) is config
    assert caplog.messages == []


def test_a_model_of_unknown_memory_recomputes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, {"model_type": "mamba"})
    with caplog.at_level(logging.INFO):
        assert fitted(config, _OnGpu(), config.model.name) is config
    assert "cannot be estimated (mamba)" in caplog.text


def test_the_update_computes_the_passes_that_were_chosen(tmp_path: Path) -> None:
    config = _config(tmp_path, _QWEN_05B, "--sampling.max_new_tokens", "8192")
    decided = fitted(config, _OnGpu(), config.model.name)
    assert config.trainer.pass_tokens == 16_384, "as on a CPU"
    assert decided.trainer.pass_tokens == 3 * 8192 + 512
