"""`common/models/memory.py` against updates of the real policy in full size, on fake tensors
(`benchmarks/rehearsal.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rehearsal import rehearse
from common.errors import ConfigError
from common.models.memory import ModelShape, trainer_memory
from common.settings.config import Config, load
from learning.attention import GQA
from tests.support.errors import raises

pytestmark = pytest.mark.integration

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "32B": (5120, 27_648, 64, 40, 8, 152_064),
}
"""The published shapes of Qwen2.5."""
_CHECKPOINTING = ["--trainer.activation_checkpointing", "true"]
_SELECTIVE = ["--trainer.activation_checkpointing", "selective"]
_GATHERED_ONCE = ["--parallel.reshard_after_forward", "false"]
_LONG = [
    "--trainer.micro_batch_tokens",
    "8192",
    "--parallel.context_size",
    "8",
    "--sampling.max_new_tokens",
    "65536",
]
"""Answers that eight ranks compute together, as many tokens each as in a pass of their own."""
_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_SMALL = (256, 1024, 4, 4, 2, 8192)


def written(directory: Path, sizes: tuple[int, ...], *words: str, **more: Any) -> Config:
    """Writes the configuration of the model; returns that of the run."""
    shape = dict(zip(_NAMES, sizes, strict=True)) | {"model_type": "qwen2"} | more
    (directory / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 32_768}))
    return load(["--model.name", str(directory), "--optimizer.warmup_steps", "0", *words], {})


@pytest.mark.parametrize(
    ("size", "ranks", "words"),
    [
        pytest.param("0.5B", 1, [], marks=pytest.mark.slow),
        pytest.param("1.5B", 1, [], marks=pytest.mark.slow),
        pytest.param("7B", 8, _CHECKPOINTING, marks=pytest.mark.slow),
        pytest.param("7B", 8, ["--lora.rank", "16"], marks=pytest.mark.slow),
        pytest.param("32B", 16, _CHECKPOINTING, marks=pytest.mark.slow),
        pytest.param(
            "7B", 16, [*_CHECKPOINTING, "--parallel.shard_size", "8"], marks=pytest.mark.slow
        ),
        pytest.param("32B", 16, [*_CHECKPOINTING, *_LONG], marks=pytest.mark.slow),
        pytest.param("7B", 8, [*_CHECKPOINTING, *_GATHERED_ONCE], marks=pytest.mark.slow),
        pytest.param("1.5B", 8, [*_SELECTIVE, *_GATHERED_ONCE], marks=pytest.mark.slow),
        pytest.param("0.5B", 4, [], marks=pytest.mark.slow),
        pytest.param("1.5B", 8, ["--parallel.shard_size", "1"], marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else str(value),
)
def test_an_update_uses_the_estimated_memory(
    tmp_path: Path, size: str, ranks: int, words: list[str]
) -> None:
    config = written(tmp_path, _QWEN[size], *words, tie_word_embeddings=size in ("0.5B", "1.5B"))
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_text()))
    estimate = trainer_memory(shape, config, ranks, repeats_heads=not GQA)
    found = rehearse(config, ranks)
    held = {
        name: getattr(estimate, name) for name in ("weights", "gradients", "optimizer", "reference")
    }
    assert {name: getattr(found, name) for name in held} == held
    assert found.unknown < 1000, "the process groups' own tensors at most"
    assert 0.9 < found.peak / (estimate.total - estimate.overhead) <= 1


@pytest.mark.parametrize(
    ("kind", "sizes", "ranks", "words"),
    [
        pytest.param("qwen3", (1024, 3072, 4, 16, 8, 151_936), 1, [], marks=pytest.mark.slow),
        pytest.param(
            "qwen2",
            (3584, 18_944, 8, 28, 4, 152_064),
            8,
            ["--trainer.micro_batch_tokens", "512"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                "qwen2",
                (896, 4864, 4, 14, 2, 151_936),
                2,
                ["--trainer.micro_batch_tokens", "512", "--parallel.shard_size", "1"],
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            (4096, 14_336, 3, 32, 8, 128_256),
            4,
            ["--parallel.shard_size", "2"],
            marks=pytest.mark.slow,
        ),
        pytest.param("mistral", (4096, 14_336, 3, 32, 8, 32_768), 8, [], marks=pytest.mark.slow),
        pytest.param("phi3", (3072, 8192, 3, 32, 32, 32_064), 1, [], marks=pytest.mark.slow),
        pytest.param(
            "olmo2", (4096, 11_008, 3, 32, 32, 100_352), 4, _CHECKPOINTING, marks=pytest.mark.slow
        ),
        pytest.param("gemma3_text", (1152, 6912, 4, 4, 1, 262_144), 1, [], marks=pytest.mark.slow),
        pytest.param(
            "qwen2",
            (3584, 18_944, 3, 28, 4, 152_064),
            2,
            ["--algorithm.kl_coef", "0.1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_updates_of_other_models_use_the_estimated_memory(
    tmp_path: Path, kind: str, sizes: tuple[int, ...], ranks: int, words: list[str]
) -> None:
    """A few layers of each: norms of queries and keys, a vocabulary larger than the layers, few
    tokens, a reference."""
    config = written(
        tmp_path,
        sizes,
        *words,
        model_type=kind,
        tie_word_embeddings=False,
        head_dim=128,
        pad_token_id=0,
    )
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_text()))
    estimate = trainer_memory(shape, config, ranks, repeats_heads=not GQA)
    found = rehearse(config, ranks)
    assert found.held == estimate.held
    assert 0.7 < found.peak / (estimate.total - estimate.overhead) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], _CHECKPOINTING, [*_CHECKPOINTING, "--parallel.expert_size", "8"]],
    ids=["kept", "recomputed", "shared_out"],
)
def test_an_update_of_experts_uses_the_estimated_memory(tmp_path: Path, words: list[str]) -> None:
    """Four layers of Qwen3-30B-A3B's shape. With selective checkpointing the rehearsal is no
    reference: its grouped products are not the kernel of a GPU."""
    sizes = (2048, 6144, 4, 32, 4, 151_936)
    more = _EXPERTS | {"head_dim": 128, "model_type": "qwen3_moe", "tie_word_embeddings": False}
    config = written(tmp_path, sizes, *words, **more)
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_text()))
    estimate = trainer_memory(shape, config, 8, repeats_heads=not GQA)
    found = rehearse(config, 8)
    assert found.held == estimate.held
    assert 0.9 < found.peak / (estimate.total - estimate.overhead) <= 1.02


def test_a_kernel_that_needs_repeated_heads_uses_the_estimated_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch 2.11, whose kernel has no `enable_gqa`."""
    monkeypatch.setattr("learning.attention.GQA", False)
    config = written(tmp_path, (896, 4864, 6, 14, 2, 8192), tie_word_embeddings=True)
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_text()))
    peak = rehearse(config, 1).peak
    estimate = trainer_memory(shape, config, ranks=1, repeats_heads=True)
    assert 0.9 < peak / (estimate.total - estimate.overhead) <= 1
    fewer_heads = trainer_memory(shape, config, ranks=1)
    assert peak > fewer_heads.total - fewer_heads.overhead, "the repeated heads are the difference"


def test_the_profile_matches_the_shapes(tmp_path: Path) -> None:
    """Six FLOPs per parameter and token: each matrix takes part in three products, with its input
    and the gradients."""
    tokens, layers = 2048, 4
    config = written(
        tmp_path, _SMALL, "--trainer.micro_batch_tokens", str(tokens), tie_word_embeddings=False
    )
    found = rehearse(config, 4, profile=True)
    matrices = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024
    flops = sum(
        cost.flops
        for (part, name), cost in found.costs.items()
        if part.startswith("layers") and name in ("mm", "addmm")
    )
    assert flops == 2 * 6 * tokens * layers * matrices
    assert {part for part, _ in found.costs} >= {
        "layers, forward",
        "layers, backward",
        "head, forward",
        "head, backward",
    }
    sums = found.messages["_reduce_scatter_base_"].calls
    assert sums == layers + 1, "once for every unit, though there are two micro-batches"


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "olmo2", "gemma3_text"],
)
def test_parameters_are_counted_as_transformers_makes_them(kind: str) -> None:
    for tied in (True, False):
        sizes = (
            dict(zip(_NAMES, _SMALL, strict=True))
            | {
                "tie_word_embeddings": tied,
                "head_dim": 32,
                "pad_token_id": 0,
            }
            | (_EXPERTS if kind == "qwen3_moe" else {})
        )
        config = AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert ModelShape.of(config.to_dict()).parameters == sum(
            each.numel() for each in model.parameters()
        )


def test_offloading_cannot_be_rehearsed_and_saves_what_is_held(tmp_path: Path) -> None:
    offload = written(tmp_path, _SMALL, "--parallel.offload_optimizer", "true")
    with raises(ConfigError, field="parallel.offload_optimizer"):
        rehearse(offload, 2)
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_text()))
    kept, here = (
        trainer_memory(shape, offload, 2),
        trainer_memory(shape, written(tmp_path, _SMALL), 2),
    )
    assert kept.held == 0
    assert kept.total == here.total - here.held
