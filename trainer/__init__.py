"""The trainer, and the Python API (docs/how-to/python-api.md).

Names are imported on first use, so that `import trainer` and the commands' `--help` do not wait for
torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback as TrainerCallback
    from transformers.trainer_callback import TrainerControl as TrainerControl
    from transformers.trainer_callback import TrainerState as TrainerState

    from common.wire.schemas import Prompt as Prompt
    from services.data.loaders import CustomDatasetLoader as CustomDatasetLoader
    from services.data.loaders import GSM8KLoader as GSM8KLoader
    from services.data.loaders import MATHLoader as MATHLoader
    from services.reward.functions import CodeRewardFunction as CodeRewardFunction
    from services.reward.functions import CompositeRewardFunction as CompositeRewardFunction
    from services.reward.functions import FormatRewardFunction as FormatRewardFunction
    from services.reward.functions import JudgeRewardFunction as JudgeRewardFunction
    from services.reward.functions import LengthPenaltyFunction as LengthPenaltyFunction
    from services.reward.functions import MathRewardFunction as MathRewardFunction
    from services.reward.functions import RepetitionPenaltyFunction as RepetitionPenaltyFunction
    from services.reward.functions import RewardFunction as RewardFunction
    from services.reward.functions import RewardModelFunction as RewardModelFunction
    from trainer.api.evaluator import ModelEvaluator as ModelEvaluator
    from trainer.api.grpo import GRPOConfig as GRPOConfig
    from trainer.api.grpo import GRPOTrainer as GRPOTrainer
    from trainer.api.grpo import RLOOConfig as RLOOConfig
    from trainer.api.grpo import RLOOTrainer as RLOOTrainer
    from trainer.api.online import OnlineRLTrainer as OnlineRLTrainer
    from trainer.api.online import TrainResult as TrainResult
    from trainer.api.scripts import DatasetMixtureConfig as DatasetMixtureConfig
    from trainer.api.scripts import ModelConfig as ModelConfig
    from trainer.api.scripts import ScriptArguments as ScriptArguments
    from trainer.api.scripts import TrlParser as TrlParser
    from trainer.api.scripts import get_dataset as get_dataset
    from trainer.api.scripts import get_kbit_device_map as get_kbit_device_map
    from trainer.api.scripts import get_peft_config as get_peft_config
    from trainer.api.scripts import get_quantization_config as get_quantization_config
    from trainer.api.settings import TrainerConfig as TrainerConfig
    from trainer.evaluation.results import EvaluationResults as EvaluationResults
    from trainer.evaluation.results import compare_evaluations as compare_evaluations
    from trainer.start.in_process import train_in_process as train_in_process

# `python -m trainer.launch` is trainer/cli/launch.py; so is `trainer.train_math`.
__path__.append(str(Path(__file__).with_name("cli")))

_HOMES = {
    "common.wire.schemas": "Prompt",
    "services.data.loaders": "CustomDatasetLoader GSM8KLoader MATHLoader",
    "services.reward.functions": (
        "CodeRewardFunction CompositeRewardFunction FormatRewardFunction JudgeRewardFunction "
        "LengthPenaltyFunction MathRewardFunction RepetitionPenaltyFunction RewardFunction "
        "RewardModelFunction"
    ),
    "transformers.trainer_callback": "TrainerCallback TrainerControl TrainerState",
    "trainer.api.evaluator": "ModelEvaluator",
    "trainer.api.grpo": "GRPOConfig GRPOTrainer RLOOConfig RLOOTrainer",
    "trainer.api.online": "OnlineRLTrainer TrainResult",
    "trainer.api.scripts": (
        "DatasetMixtureConfig ModelConfig ScriptArguments TrlParser get_dataset "
        "get_kbit_device_map get_peft_config get_quantization_config"
    ),
    "trainer.api.settings": "TrainerConfig",
    "trainer.evaluation.results": "EvaluationResults compare_evaluations",
    "trainer.start.in_process": "train_in_process",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)
ELSEWHERE = ("SFTConfig", "SFTTrainer")
"""Names of TRL that scripts import, and that are a command here."""


def __getattr__(name: str) -> Any:
    if name in ELSEWHERE:
        raise ImportError(
            f"there is no {name}: supervised fine-tuning is the command rlhf sft "
            "(docs/how-to/sft.md)"
        )
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
