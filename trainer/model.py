"""Loading the policy, and the policy as a model that scores tokens."""

import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError
from common.sections import ModelSection, TrainerSection
from services.learning.layout import Layout, Packing, layout_for
from services.learning.loading import Pretrained, load
from services.learning.ranks import Ranks
from trainer.logprobs import token_scores


def load_model(config: ModelSection, path: str | Path | None = None) -> nn.Module:
    """The causal language model `config.name` (or the directory `path`) with float32 weights.

    Master weights are float32 because at usual learning rates AdamW's updates are below the spacing of bfloat16. Raises
    ConfigError when the model cannot be loaded or its head cannot be separated from its body.
    """
    model = load_scorer(config, Ranks(device_kind="cpu"), TrainerSection(), path).model
    assert isinstance(model, nn.Module)
    return model


def load_scorer(
    config: ModelSection, ranks: Ranks, settings: TrainerSection, path: str | Path | None = None, trained: bool = True
) -> "Scorer":
    """The same, ready to score and to be trained on these ranks: sharded, or whole and the same on each.

    `path` may be a checkpoint that rank 0 alone sees. Not `trained`: a reference, whose weights stay as they are.
    """
    quiet()
    directory = ranks.same_path(Path(path) if path else None)
    pretrained = Pretrained(AutoModelForCausalLM, config.name, directory, config.trust_remote_code)
    low = ranks.device.type == "cuda" and config.dtype == "bfloat16"
    try:
        scorer = load(pretrained, partial(Scorer, packing=settings.packing), ranks, settings, low, trained)
    except (OSError, ValueError) as error:
        raise _cannot_load("model", pretrained.source, error) from None
    assert isinstance(scorer, Scorer)
    if getattr(scorer.model.config, "final_logit_softcapping", None):
        raise ConfigError(
            "models that cap their logits are not supported", field="model.name", value=config.name, remedy="take another model"
        )
    return scorer.requires_grad_(trained)  # type: ignore[no-any-return]


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
    """A causal language model that gives log-probabilities of given tokens instead of logits.

    Args:
        model: of transformers.
        packing: `trainer.packing`; ConfigError for `on` where the model does not permit it.
    """

    def __init__(self, model: Any, packing: Packing = "auto") -> None:
        super().__init__()
        self.layout = layout_for(model, packing)
        """What rows are to be made into for `forward`, which takes others too."""
        self.model = model

    def forward(self, rows: Layout, targets: Tensor, temperature: float, entropy_gradient: bool = False) -> TokenScores:
        """Log-probabilities of `targets` under softmax(logits / temperature).

        Args:
            rows: the tokens, with the positions whose next token is scored.
            targets: [C] the tokens that are scored, row by row.
            temperature: of sampling; scoring at another one than was sampled at gives other probabilities.
            entropy_gradient: for an entropy bonus; costs memory.
        """
        hidden, head = rows.hidden(self.model.get_decoder()), self.model.get_output_embeddings()
        return TokenScores(*token_scores(head, hidden, targets, temperature, entropy_gradient))
