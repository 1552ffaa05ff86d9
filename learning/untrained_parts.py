"""What a model's files have besides the causal language model that is trained.

The files of a multimodal model (`…ForConditionalGeneration`) have a vision tower, and some files
have heads that predict several tokens at once. The language model alone is loaded, trained and
published; the rest stays in its files, and every checkpoint gets a copy of it, unchanged bit for
bit.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from common.errors import ConfigError

log = logging.getLogger(__name__)
# Files that say how images become inputs of the model.
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def language_part(config: Any) -> Any:
    """Returns the config of the causal language model in a multimodal one, or `config` itself
    where there is no such part.

    Raises ValueError for a model with several text models.
    """
    text = config.get_text_config()
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    # The whole model decides whether its head is the embedding.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text


@dataclass(frozen=True)
class Kept:
    """The parts of a model's files that are not trained, such as a vision tower; they are kept."""

    config: Any
    """Config of the whole model; its language part is that of the model that is trained."""
    names: Sequence[str] = ()
    """Names of the other tensors in these files."""
    read: Callable[[str, tuple[()]], Tensor] | None = None
    """Reads one of them from the files, which stay open; None where these are not seen."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The files that say how images become inputs, by name."""

    def has_more_than(self, own: Any) -> bool:
        """Whether the model with the config `own` is only a part of the one in the files."""
        return type(own) is not type(self.config)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the other tensors, mapped from the files; empty where these are not seen."""
        if self.read is None:
            return {}
        return {name: self.read(name, ()) for name in self.names}

    def saved_config(self, own: Any) -> Any:
        """Returns the config for a directory of this model, whose config is `own`: that of the
        whole, if the model is a part of it.
        """
        if not self.has_more_than(own):
            return own
        config = deepcopy(self.config)
        config.dtype = own.dtype
        config.get_text_config().dtype = own.dtype
        return config

    @cached_property
    def decoder_path(self) -> str:
        """Returns where the whole model of transformers has the decoder, such as
        `model.language_model`.
        """
        try:
            with torch.device("meta"):
                whole: Any = AutoModelForMultimodalLM.from_config(self.config)
        except ImportError as error:
            raise ConfigError(
                f"an adapter is for the whole model, which transformers cannot build: {error}",
                field="lora.rank",
                remedy="install that package, or set lora.publish merged",
            ) from error
        decoder_class = MODEL_MAPPING[type(language_part(self.config))]
        found: list[str] = [
            name for name, module in whole.named_modules() if type(module) is decoder_class
        ]
        return found[0]

    def announce(self) -> None:
        """Says in the log what is kept."""
        if not self.names:
            return
        groups = Counter(".".join(name.split(".")[:2]) for name in self.names)
        parts = ", ".join(f"{group} ({count})" for group, count in groups.most_common(5))
        log.info(
            "%d tensors of the model's files are neither trained nor sent to the engines; "
            "checkpoints keep them as they are: %s",
            len(self.names),
            parts,
        )


def processor_texts(directory: Path) -> dict[str, str]:
    """Returns the files of a model that say how images become inputs, by name."""
    paths = [directory / name for name in _PROCESSOR_FILES]
    return {path.name: path.read_text() for path in paths if path.is_file()}
