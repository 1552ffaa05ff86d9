"""Architectures of transformers, tiny and random: each is trained for two steps or refused with the
reason.

docs/reference/models.md has one line for each, and a test fails when its line is not what happens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import Config
from common.settings.sections import ModelSection
from learning.attention import unpackable
from learning.final_logits import final_logits
from learning.layout import Packed
from learning.ranks import Ranks
from tests.support.models.families import FAMILIES
from tests.support.models.tiny_models import SIZES
from tests.support.models.two_updates import two_updates
from tests.support.paths import ROOT
from trainer.policy.scorer import load_scorer

pytestmark = [pytest.mark.slow, pytest.mark.integration]

PAGE = ROOT / "docs/reference/models.md"
NEAR = 1e-5
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_ALL_HEADS = {"num_key_value_heads": 4}
_MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bloom": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v3": {
        **_MLA,
        **_ALL_HEADS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "ernie4_5": {},
    "exaone4": {},
    "falcon": {},
    "falcon_h1": _MAMBA,
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "gptj": {"rotary_dim": 8},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0, "num_local_experts": 4},
    "helium": {},
    "hunyuan_v1_dense": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "minicpm3": {**_MLA, **_ALL_HEADS, "dim_model_base": 16},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": _MOE,
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "input_jitter_noise": 0.01},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], **_MOE},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


def written(kind: str, directory: Path) -> Any:
    """Writes a tiny model of this kind, without dropout, and its tokenizer; returns the model."""
    tokenizer = FAMILIES["Qwen2.5"].tokenizer()
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    sizes = SIZES | ids | {"bos_token_id": None, "max_position_embeddings": 256}
    own = AutoConfig.for_model(kind)
    known = {
        name: value
        for name, value in sizes.items()
        if hasattr(own, name) and not _is_derived(own, name)
    }
    dropout = {name: 0.0 for name in own.to_dict() if "drop" in name and "norm" not in name}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(known | dropout | ARCHITECTURES[kind]))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def _is_derived(config: Any, name: str) -> bool:
    return isinstance(getattr(type(config), name, None), property)


def line_of(kind: str, model: Any, directory: Path, outcome: str) -> str:
    """Returns the line of the table."""
    final = final_logits(model)
    scale = f"{final.scale:.4g}"
    logits = [] if scale == "1" else [f"× {scale}"]
    logits += [] if final.cap is None else [f"capped at {final.cap:.4g}"]
    return f"| `{kind}` | {layout_of(model, directory)} | {', '.join(logits) or 'as they are'} | {outcome} |"


def layout_of(model: Any, directory: Path) -> str:
    """Returns how the trainer lays out the rows of the model, and why not packed."""
    try:
        layout = load_scorer(ModelSection(name=str(directory)), Ranks(), Config()).layout
    except ConfigError:
        return "–"
    return (
        "packed"
        if layout is Packed
        else f"padded: {unpackable(model) or 'packed rows would change one another'}"
    )


async def outcome_of(directory: Path, workplace: Path) -> str:
    """Trains for two steps and returns `trained`, or the reason of the refusal."""
    try:
        updates = await two_updates(directory, workplace, {"data.prompt_template": "{question}"})
    except ConfigError as error:
        return f"refused: {error.message.partition(': ')[0]}"
    for metrics in updates:
        assert metrics.delta_logprob < NEAR
        assert metrics.grad_norm > 0
    return "trained"


@pytest.mark.parametrize("kind", ARCHITECTURES)
async def test_an_architecture_is_trained_or_refused_as_the_table_says(
    kind: str, tmp_path: Path
) -> None:
    model = written(kind, tmp_path / "model")
    line = line_of(kind, model, tmp_path / "model", await outcome_of(tmp_path / "model", tmp_path))
    assert line in PAGE.read_text().splitlines()


def test_the_table_has_no_other_lines() -> None:
    kinds = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert kinds == sorted(ARCHITECTURES)
