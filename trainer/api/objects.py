"""Reads objects of other libraries given to the trainer: models, tokenizers, LoRA settings and
optimisers.
"""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from common.errors import ConfigError, shorten
from common.settings.sections import ModelSection
from trainer.api.settings import TrainerConfig
from trainer.policy.scorer import load_model, load_tokenizer


class CallerModel:
    """The model and tokenizer that the caller gave; objects are saved in a directory.

    Args:
        model: a transformers model; None or a name if the settings name it.
        tokenizer: a tokenizer, or its name; None for the model's own.
        directory: to which both are written.

    Raises ConfigError for objects that are neither.
    """

    def __init__(self, model: Any, tokenizer: Any, directory: Path) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._directory = directory
        self._is_saved = False
        self.is_object = model is not None and not isinstance(model, str | Path)
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "the model already has an adapter",
                field="model",
                value=type(model).__name__,
                remedy="give the model without the adapter, and its LoraConfig as peft_config",
            )
        _check_object(model, "model", method="save_pretrained")
        _check_object(tokenizer, "processing_class", method="encode")

    def saved(self, config: TrainerConfig) -> str:
        """Returns the name or directory of the model; the first call writes the directory."""
        if not self.is_object and self._tokenizer is None:
            return config.model_name_or_path
        if self._is_saved:
            return str(self._directory)

        trust = bool(config.settings.get("model.trust_remote_code", False))
        section = ModelSection(name=config.model_name_or_path, trust_remote_code=trust)
        model = self.model if self.is_object else load_model(section)
        tokenizer: Any = self._tokenizer
        if tokenizer is None or isinstance(tokenizer, str | Path):
            own_name = getattr(model, "name_or_path", "")
            name = str(tokenizer or own_name or config.model_name_or_path)
            tokenizer = load_tokenizer(section.model_copy(update={"name": name}))

        self._directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(self._directory)
        tokenizer.save_pretrained(self._directory)
        self._is_saved = True
        return str(self._directory)

    def load(self, directory: Path) -> None:
        """Loads the weights in a directory into the caller's model object."""
        trained = type(self.model).from_pretrained(directory)
        self.model.load_state_dict(trained.state_dict())


def _check_object(given: Any, field: str, method: str) -> None:
    """Raises ConfigError for an object without the method of its kind; a name needs none."""
    if given is None or isinstance(given, str | Path) or hasattr(given, method):
        return
    raise ConfigError(
        "an object of this type cannot be saved",
        field=field,
        value=type(given).__name__,
        remedy="give a transformers object, or a name",
    )


def optimizer_settings(optimizers: Any) -> dict[str, Any]:
    """Returns the fields for TRL's `optimizers`: an AdamW without a scheduler. Raises ConfigError
    for anything else.
    """
    optimizer, scheduler = optimizers or (None, None)
    if scheduler is not None:
        raise ConfigError(
            "the learning rate is a function of the step, so that a resumed run has the same rates",
            field="optimizers",
            value=type(scheduler).__name__,
            remedy="set lr_scheduler_type and warmup_steps instead",
        )
    if optimizer is None:
        return {}
    import torch

    if type(optimizer) is not torch.optim.AdamW:
        raise ConfigError(
            "the trainer supports only AdamW, whose state it shards and saves with the weights",
            field="optimizers",
            value=type(optimizer).__name__,
            remedy="give torch.optim.AdamW, or leave it out",
        )
    if optimizer.state or len(optimizer.param_groups) != 1:
        reason = f"it has {len(optimizer.param_groups)} groups of parameters"
        if optimizer.state:
            reason = "it has already taken steps"
        raise ConfigError(
            reason,
            field="optimizers",
            value="AdamW",
            remedy="give a new optimiser with one group of parameters",
        )
    (group,) = optimizer.param_groups
    fixed = {"eps": 1e-8, "amsgrad": False, "maximize": False}
    for name, value in fixed.items():
        if group[name] != value:
            raise ConfigError(
                "the trainer's AdamW has another value",
                field=f"optimizers: {name}",
                value=group[name],
                remedy=f"leave it at {value}",
            )
    return {
        "learning_rate": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "settings": {"trainer.adam_betas": tuple(group["betas"])},
    }


_READ = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
_ANY = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "init_lora_weights",
)
"""Fields of LoraConfig that do not affect the adapter, or have separate checks."""


def lora_settings(config: Any) -> dict[str, Any]:
    """Returns the settings of `lora` for a LoraConfig. Raises ConfigError for unsupported
    options.
    """
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(
            "the trainer supports only LoRA adapters",
            field="peft_config",
            value=type(config).__name__,
            remedy="give a peft.LoraConfig, or leave it out to train all weights",
        )
    for field in fields(config):
        if field.name in _READ or field.name in _ANY:
            continue
        value = getattr(config, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value and value != default:
            raise ConfigError(
                "an adapter of this trainer consists only of two matrices beside each linear layer",
                field=f"peft_config.{field.name}",
                value=shorten(value),
                remedy="leave it out",
            )
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ConfigError(
            "the policy must be a causal language model",
            field="peft_config.task_type",
            value=config.task_type,
            remedy="set task_type to CAUSAL_LM",
        )
    if config.init_lora_weights is not True:
        raise ConfigError(
            "an adapter of this trainer starts with B = 0",
            field="peft_config.init_lora_weights",
            value=config.init_lora_weights,
            remedy="leave it at True",
        )
    alpha = float(config.lora_alpha)
    if config.use_rslora:
        # Rank-stabilised LoRA scales by alpha / sqrt(r), ours by alpha / r.
        alpha = config.lora_alpha * config.r**0.5
    return {
        "lora.rank": config.r,
        "lora.alpha": alpha,
        "lora.dropout": config.lora_dropout,
        "lora.target_modules": _targets(config),
    }


def _targets(config: Any) -> list[str]:
    targets = config.target_modules
    if targets == "all-linear":
        return []
    if isinstance(targets, str):
        raise ConfigError(
            "a pattern cannot choose the layers, only their names can",
            field="peft_config.target_modules",
            value=targets,
            remedy="name the layers in a list, or all-linear",
        )
    if targets is None:
        raise ConfigError(
            "PEFT's choice depends on its version and on the model",
            field="peft_config.target_modules",
            value=None,
            remedy="name the layers in a list, such as ['q_proj', 'v_proj'], or all-linear",
        )
    return sorted(targets)
