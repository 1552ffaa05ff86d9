"""A checkpoint as a plain Hugging Face directory; a LoRA adapter is merged into its model."""

import shutil
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.models.hub import check_model
from common.process.imports import heavy_imports
from common.process.storage import make_directory, storing
from trainer.policy.trained_prompts import TRAINED_PROMPTS, copy_trained_prompts

DTYPES = ("float32", "bfloat16", "float16")
"""Types in which weights can be written."""
MODEL_FILES = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "language_model*.safetensors",
    "kept*.safetensors",
    "*processor_config.json",
    "model.safetensors.index.json",
    "pytorch_model*",
    "adapter_config.json",
    "adapter_model.*",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*",
    TRAINED_PROMPTS,
)
"""The files of a model besides its config.json, in a directory or on the hub. Files that the model
which replaces it does not have must be removed: transformers would apply an old adapter to new
weights."""


def export(
    checkpoint: Path, out: Path, dtype: str = "float32", trust_remote_code: bool = False
) -> Path:
    """Writes the model of `checkpoint` and its tokenizer to `out`, atomically, and returns that
    path.

    Args:
        checkpoint: directory of a model or of a LoRA adapter, which is merged into its model.
        out: directory that does not exist yet.
        dtype: type of the written weights, one of `DTYPES`.
        trust_remote_code: run Python code that comes with the model.

    Raises ConfigError when `out` exists or the checkpoint cannot be loaded, and StorageFailed when
    the disk is full or broken.
    """
    if out.exists():
        raise ConfigError(
            "this directory already exists",
            field="OUT",
            value=str(out),
            remedy="name a directory that does not exist yet",
        )
    if not checkpoint.is_dir():
        raise ConfigError(
            "there is no such directory",
            field="CHECKPOINT",
            value=str(checkpoint),
            remedy="name a checkpoint",
        )
    check_model(str(checkpoint), "CHECKPOINT")
    make_directory(out.parent, "OUT")
    with heavy_imports():
        import torch

        from common.settings.sections import ModelSection
        from learning.saving import Contents
        from trainer.policy.scorer import load_model, load_tokenizer

    section = ModelSection(name=str(checkpoint), trust_remote_code=trust_remote_code)
    weights_type = getattr(torch, dtype)
    try:
        model: Any = load_model(section).to(weights_type)
    except ConfigError as error:  # names the setting of a run
        raise ConfigError(
            error.message, field="CHECKPOINT", value=str(checkpoint), remedy=error.remedy
        ) from None

    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.config.dtype = weights_type
    try:
        with storing("the model", out, "OUT", "export again"):
            Contents.of(model, model.kept).write(partial)
            load_tokenizer(section).save_pretrained(partial)
            copy_trained_prompts(checkpoint, partial)
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out
