"""Loading of models, and models that score tokens."""

import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError
from common.models.hub import check_causal, check_model, check_tokenizer, no_tokenizer
from common.settings.chat_templates import OWN
from common.settings.config import Config
from common.settings.sections import ModelSection, TrainerSection
from learning.batch_independence import check_batch_independence, fix_rotary_factors
from learning.context import ContextGroup
from learning.final_logits import final_logits
from learning.hub_names import of_language_part
from learning.layout import Layout, Packing, Padded, layout_for, moved, not_together
from learning.loading import AddedModules, Pretrained, load
from learning.ranks import Ranks
from learning.routing import Routers
from learning.sampling_support import Support
from learning.sharding import reshard
from trainer.policy import checkpoint
from trainer.policy.logprobs import token_scores

log = logging.getLogger(__name__)
_UNFIT = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors of a model's own code that meets what it was not written for."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's counterpart of a model's `config.json`."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files."""


def is_adapter(path: str | Path) -> bool:
    """Returns whether `path` is a directory with a LoRA adapter instead of a model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def _base_of(name: str) -> str:
    """Returns the base model of the adapter `name`; `name` itself when it is a model."""
    if not is_adapter(name):
        return name
    config = json.loads((Path(name) / ADAPTER_CONFIG).read_text())
    return str(config["base_model_name_or_path"])


def load_model(config: ModelSection) -> nn.Module:
    """Loads the causal language model `config.name` in float32, merging an adapter.

    Master weights are float32 because at usual learning rates AdamW's updates are below the spacing
    of bfloat16. Raises ConfigError when the model cannot be loaded or its head cannot be separated
    from its body.
    """
    source = config.name
    check_model(source)
    checkpoint.check_model(Path(source))
    whole = config.model_copy(update={"name": _base_of(source)})
    model = load_scorer(whole, Ranks(device_kind="cpu"), Config()).model
    if is_adapter(source):
        from peft import PeftModel  # slow to import

        try:
            if not (Path(source) / ADAPTER_WEIGHTS).is_file():
                raise ValueError("it has no adapter_model.safetensors, the only supported format")
            with own_adapter(source, model) as directory:
                adapted = PeftModel.from_pretrained(model, directory)
                # Once more, as only this returns what did not fit.
                misfits = adapted.load_adapter(directory, "default")
            unfit = [*misfits.unexpected_keys, *misfits.missing_keys]
            if unfit:
                raise ConfigError(
                    f"the adapter does not fit its model {whole.name}: {len(unfit)} tensors are "
                    f"only in one of the two, such as {min(unfit)}",
                    field="model.name",
                    value=source,
                    remedy="name the model on which it was trained as base_model_name_or_path in "
                    f"its {ADAPTER_CONFIG}",
                )
            model = adapted.merge_and_unload()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise cannot_load("adapter", source, error) from None
    assert isinstance(model, nn.Module)
    return model


@contextmanager
def own_adapter(source: str, model: Any) -> Iterator[str]:
    """Yields a directory with the adapter in `source`, its names changed to those of `model` if
    `model` is only the language part of the model that the adapter was made for.
    """
    if not model.kept.has_more_than(model.config):
        yield source
        return
    settings = json.loads((Path(source) / ADAPTER_CONFIG).read_text())
    settings["exclude_modules"] = None
    parameters = settings.get("target_parameters") or []
    settings["target_parameters"] = [of_language_part(name) for name in parameters]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(Path(source) / ADAPTER_WEIGHTS).items():
        own_name = of_language_part(name.removeprefix(ADAPTER_PREFIX))
        tensors[ADAPTER_PREFIX + own_name] = tensor
    with TemporaryDirectory(prefix="rlhf-math-") as directory:
        (Path(directory) / ADAPTER_CONFIG).write_text(json.dumps(settings))
        save_file(tensors, Path(directory) / ADAPTER_WEIGHTS)
        yield directory


def computes_in_bfloat16(config: ModelSection, ranks: Ranks) -> bool:
    """Returns whether these ranks compute in bfloat16."""
    return ranks.on_gpu and config.dtype == "bfloat16"


def load_scorer(
    model: ModelSection,
    ranks: Ranks,
    config: Config,
    path: str | Path | None = None,
    *,
    trained: bool = True,
    added: AddedModules | None = None,
    max_tokens: int | None = None,
) -> "Scorer":
    """Loads a model for scoring and training on these ranks: sharded, or a full copy on each.

    `path` may be a checkpoint that only rank 0 sees. A model that is not `trained` is a frozen
    reference. `added` adds an adapter, and only the adapter is trained. `max_tokens` bounds the
    sequences of the run (`learning.batch_independence`). Raises ConfigError as `load_model` does,
    and for a model that does not compute each sequence independently.
    """
    quiet()
    directory = ranks.broadcast(Path(path) if path else None)
    pretrained = Pretrained(
        AutoModelForCausalLM,
        model.name,
        directory,
        trust_remote_code=model.trust_remote_code,
        configure=partial(fix_rotary_factors, max_tokens=max_tokens),
        added=added or AddedModules(),
    )
    if is_adapter(pretrained.source):
        raise ConfigError(
            "a run must start from a whole model, and this is an adapter",
            field="model.name",
            value=pretrained.source,
            remedy="merge it first: rlhf export ADAPTER OUT",
        )
    if directory is None:
        check_model(model.name)
        check_causal(model.name)
    in_bfloat16 = computes_in_bfloat16(model, ranks)
    try:
        scorer = load(
            pretrained,
            partial(
                Scorer,
                packing=config.trainer.packing,
                fp32_head=model.fp32_head,
                context=ranks.context(),
                routing_replay=config.trainer.routing_replay and trained,
                autocasts=in_bfloat16 and not ranks.sharded,
            ),
            ranks,
            config=config,
            low_precision=in_bfloat16,
            trained=trained,
        )
    except (OSError, ValueError) as error:
        raise cannot_load("model", pretrained.source, error) from None
    assert isinstance(scorer, Scorer)
    # Recording refuses routers whose choices cannot be recorded.
    with scorer.routers.recording() if scorer.routers else nullcontext():
        rates = _check_independence(
            scorer,
            ranks,
            config.trainer,
            low_precision=in_bfloat16,
            trained=trained,
            max_tokens=max_tokens,
        )
    scorer.dropout = _dropout_settings(scorer.model, rates)
    return scorer if trained else scorer.requires_grad_(False)


def _check_independence(
    scorer: "Scorer",
    ranks: Ranks,
    settings: TrainerSection,
    *,
    low_precision: bool,
    trained: bool,
    max_tokens: int | None,
) -> set[float]:
    """Checks that the model computes each sequence independently of the others in a pass, falls
    back to padded rows if packed ones are not independent, and returns the model's dropout rates.

    A collective if the model is sharded. Raises ConfigError for a model that does not.
    """

    def check() -> set[float]:
        modes = (False, True) if trained else (False,)
        return check_batch_independence(
            scorer.model,
            scorer.next_scores,
            ranks.device,
            max_tokens=max_tokens,
            low_precision=low_precision,
            modes=modes,
        )

    try:
        rates = check()
    except _UNFIT as error:
        if isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        raise ConfigError(
            f"the model's own code failed on a made-up sequence: {error}",
            field="model.name",
            value=scorer.model.config.name_or_path,
            remedy="use another model",
        ) from error
    # A model whose packed rows influence one another may still compute padded ones alone.
    except ConfigError as error:
        if scorer.layout is Padded or settings.packing == "on":
            raise
        if scorer.context is not None:
            raise not_together(error.message, scorer.context) from None
        log.info("rows are padded, because packed ones do not suit this model: %s", error.message)
        scorer.layout = Padded
        rates = check()
    reshard(scorer)
    return rates


def _dropout_settings(model: Any, rates: Collection[float]) -> list[str]:
    """Returns the settings of the model and of its adapter that give one of these dropout rates."""
    found: list[str] = []
    for name, value in model.config.get_text_config().to_dict().items():
        of_decoder = "drop" in name and not name.startswith(("summary_", "classifier_"))
        if of_decoder and isinstance(value, float) and value in rates:
            found.append(f"{name} {value}")
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.lora_dropout in rates:
            found.append(f"lora.dropout {adapter.lora_dropout}")
    return found


def load_tokenizer(config: ModelSection) -> Any:
    """Loads the tokenizer of `config.name`, with `config.chat_template`. Raises ConfigError when it
    cannot be loaded.
    """
    quiet()
    check_model(config.name)
    if Path(config.name).is_dir():
        check_tokenizer(Path(config.name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.name, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise cannot_load("tokenizer", config.name, error) from None
    if not tokenizer("1", add_special_tokens=False).input_ids:
        raise no_tokenizer(config.name)
    if config.chat_template not in ("", OWN):
        tokenizer.chat_template = config.chat_template
    return tokenizer


def context_length(config: ModelSection) -> int | None:
    """Returns the context length of `config.name` in tokens; None if unspecified. Raises
    ConfigError if unreadable.
    """
    check_model(config.name)
    try:
        found = AutoConfig.from_pretrained(
            _base_of(config.name), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise cannot_load("model", config.name, error) from None
    positions = getattr(found.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else int(positions)


def cannot_load(what: str, name: str | Path, error: Exception) -> ConfigError:
    """Returns the error for a model or tokenizer that cannot be loaded."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ConfigError(
        f"the {what} cannot be loaded: {reason}",
        field="model.name",
        value=str(name),
        remedy="name a model on the hub (with network access, and HF_TOKEN if it is gated) "
        "or a local model directory; "
        "`rlhf tiny-model DIRECTORY` makes the built-in one",
    )


def quiet() -> None:
    """Turns off transformers' progress bars and warnings, and those of PEFT about a deprecated name
    that it uses and about an adapter that does not fit, which `load_model` refuses.
    """
    warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def stop_token_ids(model: Any, tokenizer: Any, further: Sequence[int] = ()) -> list[int]:
    """Returns the ids of the tokens that end a completion: those of the tokenizer, the model's
    configs and `further`.

    Raises ConfigError when there is none, or a further one is not in the vocabulary.
    """
    ids = {tokenizer.eos_token_id}
    for config in (model.generation_config, model.config.get_text_config()):
        listed = getattr(config, "eos_token_id", None)
        ids.update(listed if isinstance(listed, list) else [listed])
    vocabulary = model.get_input_embeddings().num_embeddings
    unknown = [token for token in further if token >= vocabulary]
    if unknown:
        raise ConfigError(
            f"the id is not in the model's vocabulary of {vocabulary} tokens",
            field="sampling.stop_token_ids",
            value=unknown[0],
            remedy="give ids of its tokens",
        )
    ids = {*ids, *further} - {None}
    if not ids:
        raise ConfigError(
            "the model has no end-of-sequence token",
            field="model.name",
            value=model.config.name_or_path,
            remedy="list the tokens that end an answer in sampling.stop_token_ids, "
            "or give its tokenizer an eos_token",
        )
    return sorted(ids)


class TokenScores(NamedTuple):
    """The scores of C tokens."""

    logprobs: Tensor
    """[C] in nats, with gradient when grad is enabled."""
    entropy: Tensor
    """[C] in nats, of each token's distribution; with gradient on request."""


class Scorer(nn.Module):  # type: ignore[misc]  # torch is not typed for mypy here
    """A transformers causal language model that returns log-probabilities of given tokens instead
    of logits.

    With `autocasts` it computes in bfloat16; FSDP2 casts a sharded model itself. Raises ConfigError
    when the model's logits are anything but a scaled and capped output of its head, and for
    `packing` `on` if the model does not support it.
    """

    def __init__(
        self,
        model: Any,
        packing: Packing = "auto",
        *,
        fp32_head: bool = True,
        context: ContextGroup | None = None,
        routing_replay: bool = False,
        autocasts: bool = False,
    ) -> None:
        super().__init__()
        self._autocasts = autocasts
        self._final_logits = final_logits(model)
        self._fp32_head = fp32_head
        self.context = context
        """The ranks that compute rows together with this one, if any."""
        self.layout: type[Layout] = layout_for(model, packing, context)
        """The preferred layout of rows for `forward`, which accepts others too."""
        self.model = model
        self.routers = Routers(model) if routing_replay else None
        """The routers that use the engine's experts; None where they choose."""
        self.adapt_head: Callable[[Tensor], tuple[Tensor, Tensor] | None] = lambda _: None
        """The adapter of the head, if it has one: hidden states [C, H] -> [C, r] and [V, r], whose
        product is added to the head's output."""
        self.dropout: list[str] = []
        """The settings that make updates drop some of the model's numbers, such as
        `attention_dropout 0.1`."""

    def next_scores(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Returns log-probabilities [rows, T - 1] of `tokens` [rows, T] after the first, at
        temperature 1.

        Args:
            tokens: of rows of one length, which are laid out as in an update.
            positions: [rows, T], consecutive in a row; None for 0 to T - 1.
        """
        ids = list(tokens.cpu().numpy())
        laid_out = self.layout.of([row[:1] for row in ids], [row[1:] for row in ids])
        rows = moved(laid_out, tokens.device)
        if positions is not None:
            rows.position_ids = positions[:, :-1].reshape(rows.input_ids.shape)
        return self(rows, tokens[:, 1:].flatten(), 1.0).logprobs.view(len(tokens), -1)

    def forward(
        self,
        rows: Layout,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool = False,
        support: Support | None = None,
    ) -> TokenScores:
        """Scores `targets` [C], row by row, under softmax(logits / temperature).

        Args:
            rows: the tokens, with the positions whose next token is scored.
            targets: [C] the tokens to score, row by row.
            temperature: the sampling temperature.
            entropy_gradient: for an entropy bonus; costs memory.
            support: the tokens that each target was sampled from; the distribution is restricted to
                them.
        """
        if self.routers is not None:
            given = rows.experts
            if given is not None and self.context is not None:
                given = self.context.part(given)
            self.routers.given = given
        # With context parallelism this rank computes the scores of its own part of the line only.
        own = rows.own(self.context)
        own_targets = targets
        if own is not None:
            own_tokens = moved(torch.from_numpy(own), targets.device)
            own_targets = targets[own_tokens]
            support = support.only_for(own) if support else None

        cast = nullcontext()
        if self._autocasts:
            cast = torch.autocast(targets.device.type, torch.bfloat16)
        with cast:
            hidden = rows.hidden(self.model.get_decoder(), self.context)
            logprobs, entropy = token_scores(
                self.model.get_output_embeddings(),
                hidden,
                own_targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
                float32=self._fp32_head,
                support=support,
                final=self._final_logits,
                added=self.adapt_head(hidden),
            )
        if own is not None:
            assert self.context is not None
            logprobs = self.context.gather(logprobs, own_tokens, len(targets))
            entropy = self.context.gather(entropy, own_tokens, len(targets))
        return TokenScores(logprobs, entropy)
