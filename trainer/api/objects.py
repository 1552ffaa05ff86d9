"""Reads objects of other libraries given to the trainer: models, tokenizers, LoRA settings and
optimisers.
"""

import shutil
from copy import deepcopy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from common import Json
from common.errors import ConfigError, shorten
from common.settings.sections import ModelSection
from trainer.api import on_use
from trainer.api.settings import TrainerConfig
from trainer.policy.trained_prompts import copy_trained_prompts


class CallerModel:
    """The model and tokenizer that the caller gave; objects are saved in a directory.

    Args:
        model: a transformers model; None or a name if the settings name it.
        tokenizer: a tokenizer, or its name; None for the model's own.
        directory: to which both are written.
        peft_config: describes the adapter to add; None: the model's own adapter, if it has one.

    Raises ConfigError for objects that are neither, and for a second adapter.
    """

    def __init__(
        self, model: Any, tokenizer: Any, directory: Path, peft_config: Any = None
    ) -> None:
        own = getattr(model, "peft_config", {}).get("default")
        self.has_adapter = own is not None
        """Whether it is a PeftModel. A new adapter of the same kind is trained, on the model with
        the one that it has.
        """
        self.gets_adapter = peft_config is not None
        self.peft_config = own if peft_config is None else peft_config
        if self.has_adapter and self.gets_adapter:
            raise ConfigError(
                "the model has an adapter already",
                field="peft_config",
                value=type(peft_config).__name__,
                remedy="leave it out, or give the model without its adapter",
            )
        self.model = model
        self._tokenizer = tokenizer
        self._directory = directory
        self._is_saved = False
        self.is_object = model is not None and not isinstance(model, str | Path)
        for field, given, method in (
            ("model", model, "save_pretrained"),
            ("processing_class", tokenizer, "encode"),
        ):
            if (
                given is not None
                and not isinstance(given, str | Path)
                and not hasattr(given, method)
            ):
                raise ConfigError(
                    "an object of this type cannot be saved",
                    field=field,
                    value=type(given).__name__,
                    remedy="give a transformers object, or a name",
                )

    def lora_settings(self, config: TrainerConfig) -> Json:
        """Returns the settings of `lora`; empty without an adapter. Raises ConfigError."""
        if self.peft_config is None:
            return {}
        return lora_settings(self.peft_config, self.model or config.model_name_or_path)

    def saved(self, config: TrainerConfig) -> str:
        """Returns the name or directory of the model; the first call writes the directory."""
        if not self.is_object and self._tokenizer is None:
            return config.model_name_or_path
        if self._is_saved:
            return str(self._directory)

        model = self.model if self.is_object else on_use.load_model(_section(config))
        if self.has_adapter:
            model = deepcopy(model).merge_and_unload()
        tokenizer = self.tokenizer(config)
        shutil.rmtree(self._directory, ignore_errors=True)  # those of an earlier run
        self._directory.mkdir(parents=True)
        model.save_pretrained(self._directory)
        tokenizer.save_pretrained(self._directory)
        copy_trained_prompts(
            getattr(self.model, "name_or_path", "") or config.model_name_or_path, self._directory
        )
        self._is_saved = True
        return str(self._directory)

    def tokenizer(self, config: TrainerConfig) -> Any:
        """Returns the given tokenizer, or loads the one that is named or belongs to the model."""
        if self._tokenizer is not None and not isinstance(self._tokenizer, str | Path):
            return self._tokenizer
        own_name = getattr(self.model, "name_or_path", "")
        name = str(self._tokenizer or own_name or config.model_name_or_path)
        return on_use.load_tokenizer(_section(config).model_copy(update={"name": name}))

    def load(self, directory: Path) -> None:
        """Loads the weights in a directory into the caller's model object."""
        self.model.load_state_dict(type(self.model).from_pretrained(directory).state_dict())

    def load_adapter(self, checkpoint: Path) -> None:
        """Loads a trained adapter, and the model on which it was trained, into the caller's
        PeftModel.
        """
        from peft import load_peft_weights, set_peft_model_state_dict

        own = self.model.get_base_model()
        base = type(own).from_pretrained(self._directory).state_dict()
        for name, tensor in own.state_dict().items():
            name = name.replace(".base_layer.", ".")
            if name in base:
                tensor.copy_(base[name])
        set_peft_model_state_dict(self.model, load_peft_weights(str(checkpoint)))


def _section(config: TrainerConfig) -> ModelSection:
    return ModelSection(
        name=config.model_name_or_path,
        trust_remote_code=bool(config.settings.get("model.trust_remote_code")),
    )


def optimizer_settings(optimizers: Any) -> Json:
    """Returns the fields for TRL's `optimizers`: an AdamW without a scheduler. Raises ConfigError
    for anything else.
    """
    optimizer, scheduler = optimizers or (None, None)
    if scheduler is not None:
        raise ConfigError(
            "a scheduler cannot be given: the learning rate is a function of the step, so that a "
            "resumed run has the same rates",
            field="optimizers",
            value=type(scheduler).__name__,
            remedy="set lr_scheduler_type and warmup_steps instead",
        )
    if optimizer is None:
        return {}

    group = optimizer.param_groups[0]
    fixed = {"eps": 1e-8, "amsgrad": False, "maximize": False}
    others = {name: group.get(name) for name in fixed if group.get(name) != fixed[name]}
    is_new = not optimizer.state and len(optimizer.param_groups) == 1
    if type(optimizer).__name__ != "AdamW" or others or not is_new:
        raise ConfigError(
            "the trainer makes its own AdamW, whose state it shards and saves, and takes only "
            "learning rate, betas and weight decay from this one",
            field="optimizers",
            value=f"{type(optimizer).__name__} {others or ''}".strip(),
            remedy=f"give a new torch.optim.AdamW of one group with {fixed}, or leave it out",
        )
    return {
        "learning_rate": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "settings": {"optimizer.adam_betas": tuple(group["betas"])},
    }


_READ = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
# Fields of LoraConfig that do not affect the adapter.
_FREE = (
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
)
# Values of other fields that are what an adapter is here.
_CHOICES: Json = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "init_lora_weights": (True,),
}


def lora_settings(config: Any, model: Any) -> Json:
    """Returns the settings of `lora` for a LoraConfig on `model`, an object or a name. Raises
    ConfigError for unsupported options, all at once.
    """
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(
            "the trainer supports only LoRA adapters",
            field="peft_config",
            value=type(config).__name__,
            remedy="give a peft.LoraConfig, or leave it out to train all weights",
        )
    refused = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in (*_READ, *_FREE) or value in _CHOICES.get(field.name, ()):
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name in _CHOICES or (value and value != default):
            refused[field.name] = shorten(value)
    if refused:
        raise ConfigError(
            "this is not supported: an adapter of this trainer is two matrices beside each "
            "linear layer of a causal language model, the second of them 0 at first",
            field=", ".join(f"peft_config.{name}" for name in refused),
            value=", ".join(refused.values()),
            remedy="leave it out",
        )
    alpha = float(config.lora_alpha)
    if config.use_rslora:
        # Rank-stabilised LoRA scales by alpha / sqrt(r), ours by alpha / r.
        alpha = config.lora_alpha * config.r**0.5
    return {
        "lora.rank": config.r,
        "lora.alpha": alpha,
        "lora.dropout": config.lora_dropout,
        "lora.target_modules": _targets(config.target_modules, model),
    }


def _targets(targets: Any, model: Any) -> list[str]:
    """Returns the names of the layers that get an adapter: those in the config, or else PEFT's
    defaults for the architecture.
    """
    if targets == "all-linear":
        return []
    if targets is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        architecture = getattr(model, "config", None) or on_use.AutoConfig.from_pretrained(model)
        targets = KNOWN.get(architecture.model_type)
    if targets is not None and not isinstance(targets, str):
        targets = _last_parts(set(targets), model)
    if targets is None or isinstance(targets, str):
        raise ConfigError(
            "layers are chosen by their names, and PEFT has no default names for this model",
            field="peft_config.target_modules",
            value=targets,
            remedy="name the layers in a list, such as ['q_proj', 'v_proj'], or all-linear",
        )
    return sorted(targets)


def _last_parts(names: set[str], model: Any) -> set[str] | None:
    """Returns the last components of layers' names, as PEFT writes them out for `all-linear`; None
    if other layers have them too.
    """
    parts = {name.rpartition(".")[2] for name in names}
    if parts == names:
        return parts
    layers = set()
    for name, module in getattr(model, "named_modules", list)():
        is_adapted = hasattr(module, "base_layer") or hasattr(module, "in_features")
        if name.rpartition(".")[2] in parts and is_adapted:
            layers.add(name.removeprefix("base_model.model."))
    return parts if layers == names else None
