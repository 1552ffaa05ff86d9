"""Names whose modules import torch or transformers, which takes seconds.

Each is imported when it is first used, as in `on_use.load_model(…)`, so that `from rlhf_math import
GRPOTrainer` and a refused setting do not wait for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import AutoConfig as AutoConfig

    from learning.device import choose_device as choose_device
    from trainer.api.callbacks import Callbacks as Callbacks
    from trainer.api.callbacks import CheckpointLinks as CheckpointLinks
    from trainer.api.evaluator import ModelEvaluator as ModelEvaluator
    from trainer.policy.checkpoint import newest as newest
    from trainer.policy.scorer import context_length as context_length
    from trainer.policy.scorer import is_adapter as is_adapter
    from trainer.policy.scorer import load_model as load_model
    from trainer.policy.scorer import load_tokenizer as load_tokenizer
    from trainer.start.in_process import train_in_process as train_in_process

_HOME = {
    "AutoConfig": "transformers",
    "choose_device": "learning.device",
    "Callbacks": "trainer.api.callbacks",
    "CheckpointLinks": "trainer.api.callbacks",
    "ModelEvaluator": "trainer.api.evaluator",
    "newest": "trainer.policy.checkpoint",
    "context_length": "trainer.policy.scorer",
    "is_adapter": "trainer.policy.scorer",
    "load_model": "trainer.policy.scorer",
    "load_tokenizer": "trainer.policy.scorer",
    "train_in_process": "trainer.start.in_process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
