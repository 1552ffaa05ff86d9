"""The trainer, and the Python API (docs/how-to/python-api.md).

Names are imported when they are first used: `import trainer` and the commands' `--help` do not wait for torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.schemas import Prompt
    from services.data.loaders import CustomDatasetLoader, GSM8KLoader, MATHLoader
    from services.reward.functions import (
        CodeRewardFunction,
        CompositeRewardFunction,
        FormatRewardFunction,
        JudgeRewardFunction,
        LengthPenaltyFunction,
        MathRewardFunction,
        RepetitionPenaltyFunction,
        RewardFunction,
        RewardModelFunction,
    )
    from trainer.api.evaluator import EvaluationResults, ModelEvaluator, compare_evaluations
    from trainer.api.online import OnlineRLTrainer, TrainResult
    from trainer.api.settings import TrainerConfig
    from trainer.in_process import train_in_process

__path__.append(str(Path(__file__).with_name("cli")))  # `python -m trainer.train_math` is trainer/cli/train_math.py

_HOMES = {
    "common.schemas": ("Prompt",),
    "services.data.loaders": ("CustomDatasetLoader", "GSM8KLoader", "MATHLoader"),
    "services.reward.functions": (
        "CodeRewardFunction",
        "CompositeRewardFunction",
        "FormatRewardFunction",
        "JudgeRewardFunction",
        "LengthPenaltyFunction",
        "MathRewardFunction",
        "RepetitionPenaltyFunction",
        "RewardFunction",
        "RewardModelFunction",
    ),
    "trainer.api.evaluator": ("EvaluationResults", "ModelEvaluator", "compare_evaluations"),
    "trainer.in_process": ("train_in_process",),
    "trainer.api.online": ("OnlineRLTrainer", "TrainResult"),
    "trainer.api.settings": ("TrainerConfig",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CodeRewardFunction",
    "CompositeRewardFunction",
    "CustomDatasetLoader",
    "EvaluationResults",
    "FormatRewardFunction",
    "GSM8KLoader",
    "JudgeRewardFunction",
    "LengthPenaltyFunction",
    "MATHLoader",
    "MathRewardFunction",
    "ModelEvaluator",
    "OnlineRLTrainer",
    "Prompt",
    "RepetitionPenaltyFunction",
    "RewardFunction",
    "RewardModelFunction",
    "TrainResult",
    "TrainerConfig",
    "compare_evaluations",
    "train_in_process",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
