"""Every causal language model type of the installed transformers, tiny and random.

`write_type` makes a model of any type from its own config class: sizes are shrunk by the names of
settings, and of the layers one of each kind is kept. `SPECIAL` has what names do not tell.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.support.models.families import FAMILIES

TYPES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model types that `AutoModelForCausalLM` knows."""
_WIDTH = 32
_HEADS = 4
_HEAD = 8
SIZES: list[tuple[str, int]] = [
    (
        r"hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|(attention|router)_hidden_size",
        _WIDTH,
    ),
    (r"(in|out)put_embedding_size|embedding_size|word_embed_proj_dim|lru_width", _WIDTH),
    (r"(\w+_)?(intermediate_size(_mlp)?|ffn_dim|dim_ff|dff|n_inner|feed_forward_size)", 48),
    (r"(\w+_)?ffn_hidden_size", 48),
    (r"(moe|shared|shared_experts?|moe_shared_expert)_intermediate_size", 16),
    (r"(num|encoder|decoder|swa_num|num_encoder|num_decoder)?_?attention_heads", _HEADS),
    (r"n_heads?|num_heads|linear_num(_value)?_heads|index_n_heads", _HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|linear_num_key_heads", 2),
    (r"(swa_|linear_|linear_key_|linear_value_|index_|mamba_|attention_)?head_dim|d_head", _HEAD),
    (r"dim_head|kv_channels|attention_head_size|qk_nope_head_dim|qk_rope_head_dim", _HEAD),
    (r"v_head_dim|rotary_dim", _HEAD),
    (r"(q|kv|o)_lora_rank|query_pre_attn_scalar|hc_lowrank|laurel_rank", 16),
    (r"(mamba_d_|ssm_)?state(_size)?", 8),
    (r"(num|num_local|n_routed|moe_num)_experts", 4),
    (r"num_experts_per_tok(en)?|moe_(topk|k)|top_k_experts", 2),
    (r"(moe_)?n(um)?_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|num_expert_group|topk_group|n_groups|\w+_ngroups|\w+_n_groups", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window(_size)?|window_size|\w+_chunk_size|chunk_size|\w+_window_size", 16),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length)", 256),
    (r"max_target_positions|model_max_length|index_topk", 256),
    (r"(num_hidden|n|num|encoder|decoder|num_encoder|num_decoder)_layers?", 2),
    (r"mamba_(num|n)_heads|n_mamba_heads", _HEADS),
    (r"hidden_size_per_layer_input|pronunciation_embed_dim|shape_embed_dim", 8),
    (r"vocab_size_per_layer_input|(shape|pronunciation)_vocab_size", 300),
]
"""Names of settings, whole, and the sizes that they get; the first that matches counts."""
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
"""Settings with an entry for each layer."""
UNSET = {
    "head_dim": _HEAD,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "is_decoder": True,
}
"""Settings without which some types do not run."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_DOUBLE = {"attention_hidden_size": 64, "attention_head_dim": 16}
_QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_DOTS = {
    "head_dim": 16,
    "per_layer_config": {"1": {"num_attention_heads": 2, "num_key_value_heads": 2}},
    "layer_types": ["indexed_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_hidden_layers": 2,
}
_SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": 48,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}
"""Half of the layers use the keys and values of the others."""
_LLAMA4 = {"attention_chunk_size": 256}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **_MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0},
    "minicpm3": {"dim_model_base": 16},
    "phimoe": {"input_jitter_noise": 0.01},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"chunk_size": 64, "hidden_size": 128, "embedding_dim": 128},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_text": _DOTS,
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "llama4_text": _LLAMA4,
    "llama4": {
        "text_config": _LLAMA4,
        "vision_config": {
            "vision_output_dim": _WIDTH,
            "projector_input_dim": _WIDTH,
            "projector_output_dim": _WIDTH,
        },
    },
    "gemma3n_text": _SHARED,
    "gemma3n": {"text_config": _SHARED},
    "emu3": {
        "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6},
        "vq_config": {"base_channels": 32, "codebook_size": 8, "channel_multiplier": [1]},
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
    "zamba": {
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 3,
        **_DOUBLE,
    },
    "zamba2": {
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 3,
        "hybrid_layer_ids": [0, 2],
        "mamba_headdim": 16,
        **_DOUBLE,
    },
    "qwen4_exp_text": _QSA,
    "qwen4_exp": {"text_config": _QSA},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
"""Settings of types that need others than names tell."""
NO_MODEL = {
    "gemma4_assistant": "it drafts for another model, whose states it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose states it reads",
    "musicgen": "its language model reads another config class",
    "musicgen_melody": "its language model reads another config class",
}
"""Types of which `AutoModelForCausalLM` makes no model from the type's own config class here."""


def tiny_settings(config: Any) -> dict[str, Any]:
    """Returns the arguments that make a small config of the class of `config`, without dropout."""
    found: dict[str, Any] = {}
    defaults = config.to_dict()
    for name, value in defaults.items():
        # Some names are computed from others.
        if isinstance(getattr(type(config), name, None), property):
            continue
        size = _size(name)
        part = getattr(config, name, None) if isinstance(value, dict) else None
        if isinstance(part, PretrainedConfig):
            found[name] = {"model_type": part.model_type, **tiny_settings(part)}
        elif isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif name in UNSET and not value:
            found[name] = UNSET[name]
        elif size is not None and _counts(value):
            found[name] = min(size, value)

    # Where all heads have keys and values of their own, they keep them.
    heads = defaults.get("num_attention_heads")
    if "num_key_value_heads" in found and defaults["num_key_value_heads"] == heads:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found | _layers(defaults)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(name: str) -> int | None:
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size
    return None


def _layers(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings that keep one layer of each kind, two layers at least."""
    lists = {name: defaults[name] for name in LAYER_LISTS if defaults.get(name)}
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=False))
    kept = [number for number, kind in enumerate(kinds) if kinds.index(kind) == number]
    if len(kept) == 1:
        kept = kept * 2
    settings: dict[str, Any] = {name: [each[i] for i in kept] for name, each in lists.items()}
    return settings | {"num_hidden_layers": len(kept)}


def tiny_config(kind: str, **ids: Any) -> Any:
    """Returns a small config of the model type `kind` with these special tokens and vocabulary."""
    special = SPECIAL.get(kind, {})
    settings = _merged(tiny_settings(AutoConfig.for_model(kind)), special)
    holder = settings.get("text_config", settings)
    holder.update(ids)
    return AutoConfig.for_model(kind, **settings)


def _merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(settings)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = _merged(found[name], value) if both else value
    return found


def write_type(kind: str, directory: Path, seed: int = 0) -> Any:
    """Writes a tiny model of this type and a tokenizer of Qwen's kind; returns the model.

    The types in `NO_MODEL` get a config and an empty file of weights, and None is returned.
    """
    tokenizer = FAMILIES["Qwen2.5"].tokenizer()
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    tokenizer.save_pretrained(directory)
    if kind in NO_MODEL:
        settings = SPECIAL.get(kind) or tiny_settings(AutoConfig.for_model(kind))
        AutoConfig.for_model(kind, **settings).save_pretrained(directory)
        save_file({}, directory / "model.safetensors", metadata={"format": "pt"})
        return None
    torch.manual_seed(seed)
    config = tiny_config(kind, **ids)
    is_multimodal = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    # Its vision tower needs a package that is not installed: the files lack it.
    lacks_tower = kind == "gemma3n"
    if lacks_tower:
        model = AutoModelForCausalLM.from_config(config.get_text_config())
    else:
        model = auto.from_config(config)
    # Wide enough that tokens differ in their probabilities.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    if lacks_tower:
        file = directory / "model.safetensors"
        tensors = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        config.save_pretrained(directory)
    return model.eval()
