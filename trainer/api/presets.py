"""Presets of `TrainerConfig`."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo_math_small": {},
    "grpo_math_medium": {
        "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
        "num_generations": 8,
        "learning_rate": 2e-6,
        "gradient_accumulation_steps": 16,
        "max_new_tokens": 512,
    },
    "rloo_math": {"trainer_type": "rloo", "kl_coef": 0.05},
}
"""The fields of each preset that differ from the defaults of `TrainerConfig`."""
