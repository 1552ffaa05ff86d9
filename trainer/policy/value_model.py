"""The value model: a language model with a head that predicts one number per token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from common.errors import ConfigError
from common.models.hub import check_model
from common.settings.config import Config
from learning.batch_independence import fix_rotary_factors
from learning.context import ContextGroup
from learning.layout import Layout, Packing, layout_for, moved
from learning.loading import AddedModules, Pretrained, load
from learning.ranks import Ranks
from trainer.policy.scorer import computes_in_bfloat16, quiet

_HEADS = ("score", "classifier")
"""Names of the head in transformers' token-classification models."""


class ValueModel(nn.Module):  # type: ignore[misc]  # torch is not typed for mypy here
    """Predicts a value for every completion token: the value of the state before the token.

    `low_precision` computes the body in bfloat16 with autocast; FSDP2 casts a sharded model itself.
    Raises ConfigError if `trainer.packing` is on but the model does not support it.
    """

    def __init__(
        self,
        module: Any,
        packing: Packing = "auto",
        low_precision: bool = False,
        context: ContextGroup | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        self.layout = layout_for(module, packing, context)
        """The layout class of the rows for `forward`."""
        self.module = module
        self._low_precision = low_precision
        self.eval()  # no dropout, even in training: values of the same tokens are compared
        self.vocabulary: int = module.get_input_embeddings().num_embeddings
        self.max_tokens: int | None = getattr(
            module.config.get_text_config(), "max_position_embeddings", None
        )
        self.size: int = sum(parameter.numel() for parameter in module.parameters())
        """Number of parameters."""

    def forward(self, rows: Layout) -> Tensor:
        """Returns the values of the completion tokens, row by row: [C] float32, with gradients if
        grad is enabled.
        """
        body = getattr(self.module, self.module.base_model_prefix)
        head = _head(self.module)
        assert head is not None, "`load_value_model` refuses models without one"
        device_type = rows.input_ids.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self._low_precision):
            hidden = rows.hidden(body, self._context)
        values: Tensor = head(hidden.float())[:, 0]  # bfloat16 has only two or three digits
        own = rows.own(self._context)
        if self._context is None or own is None:
            return values
        own_tokens = moved(torch.from_numpy(own), values.device)
        return self._context.gather(values, own_tokens, len(rows.predicts))


class _NewHead(AddedModules):
    """A head of zeros, whatever the files hold."""

    def first(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Returns zeros for the head."""
        return torch.zeros(tuple(shape)) if name.partition(".")[0] in _HEADS else None


def load_value_model(config: Config, ranks: Ranks, directory: Path | None = None) -> ValueModel:
    """Loads a checkpoint's `directory`, or `critic.model` or `model.name` with a zero head, whose
    initial values are 0.

    Weights are float32, sharded or replicated over these ranks. Raises ConfigError naming
    `critic.model`, or `checkpoint` when `directory` cannot be loaded.
    """
    quiet()  # transformers warns that the head is new
    name = config.critic.model or config.model.name

    def configure(found: Any) -> None:
        found.num_labels = 1
        found.classifier_dropout = 0.0
        fix_rotary_factors(found, config.rollout.context_bound)
        _register_classifier(type(found))

    if directory is None:
        check_model(name, "critic.model" if config.critic.model else "model.name")
    pretrained = Pretrained(
        AutoModelForTokenClassification,
        name,
        directory,
        trust_remote_code=config.model.trust_remote_code,
        configure=configure,
        added=AddedModules() if directory else _NewHead(),
    )
    in_bfloat16 = computes_in_bfloat16(config.model, ranks)

    def wrap(module: Any) -> ValueModel:
        if _head(module) is None:
            raise ConfigError(
                "this model cannot have a head with one value per token",
                field="critic.model",
                value=name,
                remedy="choose a decoder that transformers supports "
                "as a text-only causal language model",
            )
        return ValueModel(
            module,
            config.trainer.packing,
            in_bfloat16 and not ranks.sharded,
            context=ranks.context(),
        )

    def exact(module: Any) -> list[Any]:
        return [_head(module)]  # `wrap` has refused a model without one

    try:
        model = load(
            pretrained,
            wrap,
            ranks,
            config=config,
            low_precision=in_bfloat16,
            exact=exact,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the value model cannot be loaded: {str(error).strip().splitlines()[0]}",
            field="checkpoint" if directory else "critic.model",
            value=str(directory or name),
            remedy="name a decoder on the hub (with network access, and HF_TOKEN if it is gated) "
            "or a local model directory; of a checkpoint, remove that directory to continue from "
            "the one before it, or start with checkpoint.resume false",
        ) from None
    assert isinstance(model, ValueModel)
    return model


def _register_classifier(kind: type[Any]) -> None:
    """Registers a token classifier for a text decoder for which transformers has none, such as
    Gemma 3's.

    It is built like transformers' own for Qwen and Llama, so that checkpoints use the same names.
    """
    has_classifier = kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    is_text_decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING and not kind.sub_configs
    if has_classifier or not is_text_decoder:
        return
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    base = next(parent for parent in causal.__mro__ if PreTrainedModel in parent.__bases__)
    name = f"{causal.__name__.removesuffix('ForCausalLM')}ForTokenClassification"
    attributes = {"config_class": kind, "base_model_prefix": causal.base_model_prefix}
    classifier = type(name, (GenericForTokenClassification, base), attributes)
    AutoModelForTokenClassification.register(kind, classifier, exist_ok=True)


def _head(module: Any) -> nn.Module | None:
    """Returns the linear head with one value per token, or None."""
    for name in _HEADS:
        head = getattr(module, name, None)
        if isinstance(head, nn.Linear):
            return head
    return None
