"""Loading the policy, and its log-probabilities without the whole logits matrix."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError
from common.sections import ModelSection
from services.learning.sequences import Padded

_CHUNK = 2048
"""Completion tokens whose logits exist at once: [2048, vocabulary] in float32."""


def load_model(config: ModelSection, path: str | Path | None = None) -> nn.Module:
    """The causal language model `config.name` (or the directory `path`) with float32 weights.

    Master weights are float32 because at usual learning rates AdamW's updates are below the spacing of bfloat16. Raises
    ConfigError when the model cannot be loaded or its head cannot be separated from its body.
    """
    quiet()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path or config.name, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _cannot_load("model", path or config.name, error) from None
    if getattr(model.config, "final_logit_softcapping", None):
        raise ConfigError(
            "models that cap their logits are not supported", field="model.name", value=config.name, remedy="take another model"
        )
    assert isinstance(model, nn.Module)
    return model


def load_tokenizer(config: ModelSection) -> Any:
    """The tokenizer of `config.name`. Raises ConfigError when it cannot be loaded."""
    quiet()
    try:
        return AutoTokenizer.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", config.name, error) from None


def context_length(config: ModelSection) -> int | None:
    """Positions of `config.name` in tokens; None where the model does not say. Raises ConfigError when it cannot be read."""
    try:
        found = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _cannot_load("model", config.name, error) from None
    positions = getattr(found.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else int(positions)


def _cannot_load(what: str, name: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the {what} cannot be loaded: {str(error).strip().splitlines()[0]}",
        field="model.name",
        value=str(name),
        remedy="name a model of the hub (with network, and HF_TOKEN if it is gated) or a local model directory; "
        "`python -m trainer.tiny_model DIRECTORY` makes the built-in one",
    )


def quiet() -> None:
    """transformers draws a progress bar for every file it reads or writes; the trainer has its own."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a completion: the tokenizer's and the generation config's end-of-sequence tokens."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id} - {None}
    if not ids:
        raise ConfigError("the model has no end-of-sequence token", field="model.name", value=model.config.name_or_path)
    return sorted(ids)


class TokenScores(NamedTuple):
    """Of C tokens."""

    logprobs: Tensor
    """[C] in nats, with gradient when grad is enabled."""
    entropy: Tensor
    """[C] in nats, of the distribution each token was drawn from; with gradient when that was asked for."""


class Scorer(nn.Module):  # type: ignore[misc]  # torch is not typed for mypy here
    """A causal language model that gives log-probabilities of given tokens instead of logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, padded: Padded, targets: Tensor, temperature: float, entropy_gradient: bool = False) -> TokenScores:
        """Log-probabilities of `targets` under softmax(logits / temperature).

        Args:
            padded: the tokens, with the positions whose next token is scored.
            targets: [C] the tokens that are scored, row by row.
            temperature: of sampling; scoring at another one than was sampled at gives other probabilities.
            entropy_gradient: for an entropy bonus; costs memory.
        """
        hidden = self.model.get_decoder()(
            input_ids=padded.input_ids, attention_mask=padded.attention_mask, use_cache=False
        ).last_hidden_state
        hidden, head = hidden[padded.predicts], self.model.get_output_embeddings()
        parts = []
        for i in range(0, len(hidden), _CHUNK):
            chunk = (head, hidden[i : i + _CHUNK], targets[i : i + _CHUNK], temperature, entropy_gradient)
            again = len(hidden) > _CHUNK and torch.is_grad_enabled()  # then logits are computed again instead of kept
            parts.append(checkpoint(_score, *chunk, use_reentrant=False) if again else _score(*chunk))
        return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def _score(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprobs, entropy
