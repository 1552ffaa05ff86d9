"""Presets of `TrainerConfig`, and other libraries' names of its fields."""

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
"""Fields of each preset; all others have their defaults."""

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
"""Fields by their names in other libraries, for the remedy in error messages."""
