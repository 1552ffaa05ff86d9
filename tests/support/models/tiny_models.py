"""Tiny random models of many kinds, and the parameter names in the hub's files of these kinds."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
"""DeepSeek-V3's compressed keys and values, whose heads differ in size."""
_STATE_AND_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **_STATE_AND_ATTENTION,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_SPARSE},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SPARSE},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "kimi_linear": {
        **MLA,
        **_STATE_AND_ATTENTION,
        "num_local_experts": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "granitemoehybrid": {
        **_STATE_AND_ATTENTION,
        **_MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], **_SPARSE, "num_dense_layers": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}
"""Model types with a linear layer (Mamba, gated delta rule, short convolution), most with attention
too."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "Llama 3": ("llama", {"rope_theta": 500_000.0}),
    "SmolLM2": ("llama", {"tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": 5}),
    "Gemma 3 text": (
        "gemma3_text",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Phi-3": ("phi3", {}),
    "Qwen3-MoE": ("qwen3_moe", _MOE),
    "Mixtral": ("mixtral", {"num_local_experts": 3}),
}
GEMMA = "Gemma 3 4B"
"""A model for text and images, like the larger Gemma 3 models."""

_DENSE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
_MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
_NORMS = ["input_layernorm", "post_attention_layernorm"]
_QK_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
_GEMMA_LAYER = [
    *_DENSE,
    *_MLP,
    *_NORMS,
    *_QK_NORMS,
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
]
_LAYER: dict[str, list[str]] = {
    "Qwen2": [*_DENSE, *_MLP, *_NORMS],
    "Qwen3": [*_DENSE, *_MLP, *_NORMS, *_QK_NORMS],
    "Llama 3": [*_DENSE, *_MLP, *_NORMS],
    "SmolLM2": [*_DENSE, *_MLP, *_NORMS],
    "Mistral": [*_DENSE, *_MLP, *_NORMS],
    "Gemma 3 text": _GEMMA_LAYER,
    "Phi-3": [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
        *_NORMS,
    ],
    "Qwen3-MoE": [
        *_DENSE,
        *_NORMS,
        *_QK_NORMS,
        "mlp.gate",
        *(
            f"mlp.experts.{expert}.{name}_proj"
            for expert in range(3)
            for name in ("gate", "up", "down")
        ),
    ],
    "Mixtral": [
        *_DENSE,
        *_NORMS,
        "block_sparse_moe.gate",
        *(
            f"block_sparse_moe.experts.{expert}.{name}"
            for expert in range(3)
            for name in ("w1", "w2", "w3")
        ),
    ],
}
_VISION_LAYER = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
    *("mlp.fc1", "mlp.fc2", "layer_norm1", "layer_norm2"),
]


def hub_names(kind: str) -> set[str]:
    """Returns the parameter names in the hub's files of this kind of model, at the sizes used
    here."""
    if kind == GEMMA:
        found = {f"language_model.{name}" for name in hub_names("Gemma 3 text")}
        found |= {
            f"multi_modal_projector.{name}"
            for name in ("mm_input_projection_weight", "mm_soft_emb_norm.weight")
        }
        vision = [f"encoder.layers.0.{name}" for name in _VISION_LAYER]
        vision += ["post_layernorm", "embeddings.patch_embedding"]
        parts = [f"{name}.{end}" for name in vision for end in ("weight", "bias")]
        return found | {
            f"vision_tower.vision_model.{name}"
            for name in (*parts, "embeddings.position_embedding.weight")
        }
    layers = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in _LAYER[kind]}
    if kind == "Qwen2":
        layers |= {
            f"model.layers.{layer}.self_attn.{name}_proj.bias"
            for layer in range(2)
            for name in "qkv"
        }
    head = (
        set() if kind in ("Qwen2", "Qwen3", "SmolLM2", "Gemma 3 text") else {"lm_head.weight"}
    )  # tied to the embedding
    return layers | head | {"model.embed_tokens.weight", "model.norm.weight"}


def make(kind: str, seed: int = 0, implementation: str | None = None, **more: Any) -> Any:
    """Makes a model whose logits differ widely between tokens; `kind` may also be any model type of
    transformers."""
    torch.manual_seed(seed)
    if kind == GEMMA:
        text = SIZES | KINDS["Gemma 3 text"][1] | more | {"model_type": "gemma3_text"}
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
        tokens = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
        model: Any = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=text, vision_config=vision, **tokens)
        )
    else:
        name, settings = KINDS.get(kind, (kind, {}))
        config = AutoConfig.for_model(name, **(SIZES | settings | more))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write(kind: str, directory: Path, seed: int = 0, **more: Any) -> Path:
    """Writes the files of such a model in the hub's form."""
    make(kind, seed, **more).save_pretrained(directory)
    if kind == GEMMA:  # the hub's files predate transformers' current names of the vision tower
        file = directory / "model.safetensors"
        tensors = {_older(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


def with_tokenizer_of(other: Path, kind: str, directory: Path, seed: int = 0, **more: Any) -> Path:
    """Writes such a model with the tokenizer and the special tokens of the model in `other`."""
    theirs = AutoConfig.from_pretrained(other)
    special = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    sizes = {name: getattr(theirs, name) for name in special}
    write(kind, directory, seed, **sizes, **more)
    AutoTokenizer.from_pretrained(other).save_pretrained(directory)
    return directory


def _older(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")
