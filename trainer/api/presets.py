"""Presets of `TrainerConfig`, and what its fields are called elsewhere."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo_math_small": {
        "trainer_type": "grpo",
        "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
        "num_generations": 4,
        "learning_rate": 5e-6,
    },
    "grpo_math_medium": {
        "trainer_type": "grpo",
        "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
        "num_generations": 8,
        "learning_rate": 2e-6,
        "gradient_accumulation_steps": 16,
        "max_new_tokens": 512,
    },
    "rloo_math": {
        "trainer_type": "rloo",
        "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
        "num_generations": 4,
        "learning_rate": 5e-6,
        "kl_coef": 0.05,
    },
}
"""What each preset sets; everything else stays at its default."""

OTHER_NAMES = {
    "beta": "kl_coef",
    "cliprange": "clip_range",
    "epsilon": "clip_range",
    "init_kl_coef": "kl_coef",
    "max_completion_length": "max_new_tokens",
    "model_name": "model_name_or_path",
    "num_epochs": "num_train_epochs",
    "rloo_k": "num_generations",
}
"""What a setting is called elsewhere: only for the remedy in the message."""
