"""The value model: a language model's body with one number for every token in place of its head."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification
from transformers.utils import logging as transformers_logging

from common.config import Config
from common.errors import ConfigError
from services.learning.layout import Layout, layout_for

_HEADS = ("score", "classifier")
"""What transformers calls the head of a model for token classification."""


class ValueModel:
    """A value for every completion token: of the state before that token, so it looks at nothing but what came before.

    Args:
        config: of the run; `critic.model` or `model.name` is what it starts from, with float32 weights and a head of
            zeros, so that its first values are exactly 0.
        directory: of a checkpoint to load instead, its head included.

    Raises ConfigError naming `critic.model`, or `checkpoint` when `directory` cannot be loaded.
    """

    def __init__(self, config: Config, directory: Path | None = None) -> None:
        self._low_precision = config.model.dtype == "bfloat16"
        name = config.critic.model or config.model.name
        self.module: Any = _load(str(directory or name), config.model.trust_remote_code, directory is not None)
        self._body = getattr(self.module, self.module.base_model_prefix)
        self._head: Any = next((getattr(self.module, head) for head in _HEADS if hasattr(self.module, head)), None)
        if not isinstance(self._head, nn.Linear):
            raise ConfigError(
                "this model has no head of one value a token",
                field="critic.model",
                value=name,
                remedy="take a decoder that transformers knows for token classification",
            )
        if directory is None:
            for parameter in self._head.parameters():
                nn.init.zeros_(parameter)
        self.layout = layout_for(self.module, config.trainer.packing)
        self.module.eval()  # values are compared with later ones of the same tokens: no dropout, also while learning
        self.vocabulary: int = self.module.get_input_embeddings().num_embeddings
        self.max_tokens: int | None = getattr(self.module.config.get_text_config(), "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        device = next(self.module.parameters()).device
        assert isinstance(device, torch.device)
        return device

    @property
    def parameters(self) -> int:
        """How many numbers it learns."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def __call__(self, rows: Layout) -> Tensor:
        """[C] values of the completion tokens, row by row, float32, with gradient when grad is enabled."""
        rows, device = rows.to(self.device), self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and self._low_precision):
            hidden = rows.hidden(self._body)
        values: Tensor = self._head(hidden.float())[:, 0]  # bfloat16 would leave a value two or three digits
        return values

    def save(self, directory: Path) -> None:
        """As a Hugging Face directory, for `AutoModelForTokenClassification`."""
        self.module.save_pretrained(directory)


def _load(name: str, trust_remote_code: bool, checkpoint: bool) -> Any:
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that the head is new
    try:
        config = AutoConfig.from_pretrained(name, num_labels=1, trust_remote_code=trust_remote_code)
        config.classifier_dropout = 0.0
        return AutoModelForTokenClassification.from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the value model cannot be loaded: {str(error).strip().splitlines()[0]}",
            field="checkpoint" if checkpoint else "critic.model",
            value=name,
            remedy="remove that directory to go on from the one before, or start with --trainer.resume false"
            if checkpoint
            else "name a decoder of the hub (with network, and HF_TOKEN if it is gated) or a local model directory",
        ) from None
