"""Shapes of published models, and the memory of a GPU in bytes."""

from typing import Any

from common.models.cache import CacheShape, EngineMemoryEstimate, engine_memory
from common.models.memory import ModelShape
from common.settings.config import Config

GPU = 80 * 10**9
_QWEN: dict[str, Any] = {"model_type": "qwen2"}
QWEN_05B = ModelShape.of(
    _QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
)
QWEN_7B = ModelShape.of(
    _QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    }
    | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
)
QWEN_30B_A3B = ModelShape.of(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
)


def engine_of(shape: ModelShape, config: Config, gpu_bytes: int) -> EngineMemoryEstimate:
    """Estimates an engine of a model in bfloat16 in which every layer attends."""
    cache = CacheShape(shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    return engine_memory(cache, 2 * shape.parameters, config, gpu_bytes)
