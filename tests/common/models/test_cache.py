"""What engines keep of a sequence of a hybrid: published sizes, sums made by hand, and the embedded
engine's own cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.models.cache import CacheShape, engine_memory
from common.models.hub import stored_bytes
from common.settings.config import load
from services.engine.decoder import Decoder
from tests.support.errors import raises
from tests.support.models.every_type import write_type

QWEN_35_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
GRANITE_H_TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": ["mamba"] * 9 + (["attention"] + ["mamba"] * 9) * 3 + ["attention"],
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
KINDS = ["granitemoehybrid", "lfm2"]
SLOW = ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "bamba", "falcon_h1", "nemotron_h", "lfm2_moe"]


def test_a_large_hybrid_keeps_what_is_published() -> None:
    """SGLang's cookbook has 153.9 MB and 65.5 KB for a model with these layers."""
    cache = CacheShape.of(QWEN_35_27B)
    assert (cache.attention_layers, cache.linear_layers) == (16, 48)
    assert cache.token_bytes(2) == 65_536
    assert cache.state_bytes(3, 2) == 153_944_064


def test_a_granite_hybrid_keeps_the_sum_of_its_layers() -> None:
    cache = CacheShape.of(GRANITE_H_TINY)
    assert cache.token_bytes(2) == 4 * (2 * 4 * 128) * 2
    # A state of 48 heads of 64 × 128, and three inputs of 48 · 64 + 2 · 128 channels.
    assert cache.state_bytes(3, 2) == 36 * (48 * 64 * 128 * 4 + 3 * 3328 * 2)
    by_pattern = CacheShape.of(
        {
            "model_type": "nemotron_h",
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "hybrid_override_pattern": "M-M*-M",
            "mamba_num_heads": 48,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        }
    )
    assert (by_pattern.attention_layers, by_pattern.linear_layers) == (1, 3)
    assert by_pattern.state_bytes(3, 2) * 12 == cache.state_bytes(3, 2)


def test_memory_of_an_engine_goes_to_states_and_to_keys() -> None:
    weights = 54 * 10**9
    cache = CacheShape.of(QWEN_35_27B)
    one, two = (
        engine_memory(
            cache, weights, load(["--rollout.tensor_parallel_size", str(size)], {}), 80 * 10**9
        )
        for size in (1, 2)
    )
    room = 68 * 10**9 - weights  # 85 % of the GPU
    states = room * 9 // 19  # 0.9 parts to states, one to keys and values
    assert one.sequences == (states // 153_944_064 - 1) // 5 == 8
    assert one.kv_tokens == pytest.approx((room - states) / 65_536, abs=1)
    assert one.completions(1000) == 8
    assert one.completions(20_000) == 5
    # Both are divided among two GPUs, each with room for 68 GB less half of the weights.
    assert (two.state_bytes, two.kv_bytes_per_token) == (76_972_032, 32_768)
    assert two.sequences == ((68 * 10**9 - weights // 2) * 9 // 19 // 76_972_032 - 1) // 5
    none = engine_memory(cache, weights, load([], {}), 40 * 10**9)
    assert (none.kv_tokens, none.sequences, none.completions(10)) == (0, 0, 0)


def test_the_embedded_engine_keeps_rows_of_the_whole_context() -> None:
    words = ["--rollout.engine", "embedded", "--rollout.max_context_tokens", "4096"]
    cache = CacheShape.of(GRANITE_H_TINY)
    found = engine_memory(cache, 14 * 10**9, load(words, {}), 80 * 10**9)
    row = 4096 * 8192 + 36 * (48 * 64 * 128 * 4 + 4 * 3328 * 2)
    assert found.completions(4096) == found.sequences == min(256, 66 * 10**9 * 3 // 10 // row)


@pytest.mark.parametrize(
    "kind",
    [*KINDS, *(pytest.param(k, marks=[pytest.mark.slow, pytest.mark.integration]) for k in SLOW)],
)
def test_the_embedded_engine_has_a_cache_of_the_estimated_size(kind: str, tmp_path: Path) -> None:
    model = write_type(kind, tmp_path)
    decoder = Decoder(model, 112)
    with torch.inference_mode():
        decoder.prefill([[1, 2, 3]], [0, 0], 0)
    cache = CacheShape.of(model.config.to_dict())
    assert cache.linear_layers > 0
    expected = 100 * cache.token_bytes(4) + cache.state_bytes(cache.kernel, 4)
    assert decoder.cache.bytes_per_row(100) == expected
    file = tmp_path / "model.safetensors"
    assert stored_bytes(str(tmp_path)) == file.stat().st_size


def test_what_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheShape.of({"model_type": "mixtral"})
    assert (caught.value.field, caught.value.value) == ("model_type", "mixtral")
    incomplete = {name: value for name, value in GRANITE_H_TINY.items() if name != "mamba_d_state"}
    with raises(ConfigError, field="config.json", value="mamba_d_state"):
        CacheShape.of(incomplete)
