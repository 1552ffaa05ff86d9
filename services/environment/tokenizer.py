"""Loads the chat template of the model."""

import os
from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError
from common.models.hub import check_model
from common.settings.chat_templates import OWN
from common.settings.sections import ModelSection
from services.environment.template import Template


def load_template(config: ModelSection, variables: Mapping[str, Any]) -> tuple[Template, list[int]]:
    """Returns the template of `config.name`, and the tokens that end an answer. Raises ConfigError.

    Never imports torch: the tokenizer does not need it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer, GenerationConfig  # slow to import

    check_model(config.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.name, trust_remote_code=config.trust_remote_code
        )
        if config.chat_template not in ("", OWN):
            tokenizer.chat_template = config.chat_template
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"the tokenizer cannot be loaded: {reason}",
            field="model.name",
            value=config.name,
            remedy="name a model with a tokenizer, or set HF_TOKEN",
        ) from None

    try:
        eos_token_id = GenerationConfig.from_pretrained(config.name).eos_token_id
    except OSError:  # the model has no such file
        eos_token_id = None
    # It is a token, a list of tokens or None.
    candidates = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    stop_token_ids = sorted({*candidates, tokenizer.eos_token_id} - {None})
    if not stop_token_ids:
        raise ConfigError(
            "the model has no end-of-sequence token",
            field="model.name",
            value=config.name,
            remedy="set eos_token_id in its generation_config.json",
        )
    return Template(tokenizer, stop_token_ids, variables), stop_token_ids
