"""Models with windows, capped scores, sinks, and scaled or capped logits: the engine equals
transformers, at any length."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from common.errors import ConfigError
from services.engine.attention import _by_products, _fused, replace_attention
from services.engine.cache import additive
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.kernels import compiled
from services.engine.model import Model
from tests.support.engines.engines import write_model
from tests.support.errors import raises

WINDOW, CONTEXT = 8, 96
SHAPE: dict[str, Any] = {
    "vocab_size": 290,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=16, layer_types=MIXED, query_pre_attn_scalar=16),
    "mistral": MistralConfig(**SHAPE, head_dim=12),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=2),
    "phi3": Phi3Config(**SHAPE),
    "gemma2": Gemma2Config(
        **SHAPE,
        head_dim=8,
        layer_types=MIXED,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=0.5,
    ),
    "cohere2": Cohere2Config(**SHAPE, layer_types=MIXED, logit_scale=0.25),
    "granite": GraniteConfig(**SHAPE, logits_scaling=0.5),
    "gpt_oss": GptOssConfig(
        **SHAPE, head_dim=8, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
}
WHOLE = {**SHAPE, "sliding_window": None}
LEAN: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        **WHOLE,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    ),
    "mistral without a window": MistralConfig(**WHOLE, head_dim=12, tie_word_embeddings=True),
    "qwen2 without a window": Qwen2Config(**WHOLE),
    "qwen3": Qwen3Config(**WHOLE, head_dim=16),
}
"""Models whose passes are `services.engine.llama_on_cpu`'s."""
CONFIGS |= LEAN


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tokenizer") / "model", seed=0)


def write(directory: Path, tokenizer_dir: Path, kind: str) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # sinks, biases and the factors of norms, which begin as 0 and 1
            torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.2)
            if "norm" in name:
                parameter.data += 1.0
    model.save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(tokenizer_dir).save_pretrained(directory)
    return directory


@contextmanager
def running(model: Model, max_running: int = 12) -> Iterator[Engine]:
    engine = Engine(model, max_running=max_running)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def prompts() -> list[list[int]]:
    """Returns prompts shorter than the window, as long, one longer, and several times as long."""
    rng = random.Random(1)
    return [
        [rng.randrange(10, 280) for _ in range(length)]
        for length in (3, WINDOW, WINDOW + 1, 5 * WINDOW, 1)
    ]


def _not_called(*_: object) -> None:
    raise AssertionError("transformers' decoder computes")


@pytest.mark.parametrize("kind", CONFIGS)
def test_embedded_logprobs_beyond_the_window_equal_a_plain_forward(
    kind: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    directory = write(tmp_path / kind, tokenizer_dir, kind)
    plain = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    jobs = [
        GenerationJob(str(i), ids, SamplingParams(max_new_tokens=30 - i, sampling_seed=i), n=2)
        for i, ids in enumerate(prompts())
    ]
    with running(Model(directory, CONTEXT)) as engine:
        if kind in LEAN and compiled():
            engine.model.module.get_decoder().register_forward_pre_hook(_not_called)
        engine.submit(jobs)
        found = [(job, sequence) for job in jobs for sequence in job.done.result(300)]
    for job, sequence in found:
        ids = torch.tensor([job.prompt + sequence.tokens])
        with torch.inference_mode():
            logits = plain(ids, use_cache=False).logits[0, len(job.prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_embedded_greedy_beyond_the_window_equals_generate(
    kind: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    directory = write(tmp_path / kind, tokenizer_dir, kind)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    jobs = [
        GenerationJob(str(i), ids, SamplingParams(max_new_tokens=40, temperature=0.0))
        for i, ids in enumerate(prompts())
    ]
    with running(Model(directory, CONTEXT)) as engine:
        engine.submit(jobs)
        found = [job.done.result(300)[0].tokens for job in jobs]
    for job, tokens in zip(jobs, found, strict=True):
        ids = torch.tensor([job.prompt])
        with torch.inference_mode():
            options = {
                "attention_mask": torch.ones_like(ids),
                "do_sample": False,
                "max_new_tokens": 40,
                "eos_token_id": -1,
            }
            output = model.generate(ids, **options)
        assert tokens == output[0, len(job.prompt) :].tolist()


def test_embedded_unavailable_attention_is_refused_at_the_start(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    directory = write(tmp_path / "model", tokenizer_dir, "gemma3")
    config = directory / "config.json"
    config.write_text(
        config.read_text().replace(
            '"use_bidirectional_attention": false', '"use_bidirectional_attention": true'
        )
    )
    with raises(ConfigError, field="use_bidirectional_attention"):
        Model(directory, CONTEXT)


def test_embedded_chunks_shorter_than_the_context_are_refused() -> None:
    config = SimpleNamespace(attention_chunk_size=64)
    with pytest.raises(ConfigError) as caught:
        replace_attention(MagicMock(), config, max_context_tokens=65)
    assert caught.value.field == "--max-context-tokens"
    assert replace_attention(MagicMock(), config, max_context_tokens=64)


def test_embedded_the_fused_attention_of_a_gpu_computes_the_same() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 64, 8), torch.randn(3, 2, 64, 8)
    positions = torch.tensor([0, 40, 63])[:, None, None, None]
    for window in (64, 5):
        seen = (torch.arange(64) <= positions) & (torch.arange(64) > positions - window)
        mask = additive(seen, torch.float32)
        wanted = _by_products(query, key, value, scale=0.3, mask=mask, softcap=None, sinks=None)
        torch.testing.assert_close(
            _fused(query, key, value, 0.3, mask), wanted, atol=1e-6, rtol=1e-5
        )
