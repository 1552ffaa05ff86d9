"""The model and its tokenizer: prefill of prompts, one decode step for all running rows."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache

from common.errors import ConfigError
from services.engine import attention
from services.engine.cache import SlotCache

log = logging.getLogger(__name__)


class Model:
    """Any transformers causal language model with full attention, in float32, from a local directory.

    Raises ConfigError when the directory is not such a model.
    """

    def __init__(self, path: Path, max_context_tokens: int) -> None:
        if not (path / "config.json").is_file():
            raise ConfigError(
                "no model directory", field="--model-path", value=path, remedy="name a directory with config.json"
            )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            options = {"local_files_only": True, "use_safetensors": True}
            loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
        except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
            raise ConfigError(f"the model does not load: {error}", field="--model-path", value=path) from error
        self.path = path
        self.module = loaded.eval().requires_grad_(False)
        self.config = loaded.config.get_text_config()
        _check_attention(self.config, max_context_tokens)
        longest = getattr(self.config, "max_position_embeddings", None) or max_context_tokens
        if longest < max_context_tokens:
            log.info("the context is %d tokens: the model has no more positions", longest)
        self.max_context_tokens = min(longest, max_context_tokens)
        self.vocab_size = int(loaded.get_input_embeddings().weight.shape[0])
        self.eos_ids = _eos_ids(self.tokenizer, self.config, loaded.generation_config)
        if self.config._attn_implementation == "sdpa":
            loaded.set_attn_implementation(attention.NAME)
        self.cache = SlotCache(self.config.num_hidden_layers)
        self._last: Tensor | None = None
        loaded.get_output_embeddings().register_forward_pre_hook(self._only_last)

    def _only_last(self, _: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Lets only the last position of every prompt through lm_head (prompts of one batch differ in length)."""
        if self._last is None:
            return None
        hidden, *rest = arguments
        return (hidden[torch.arange(len(hidden)), self._last][:, None], *rest)

    def prefill(self, prompts: Sequence[Sequence[int]], every_position: bool = False) -> tuple[Tensor, Cache]:
        """Logits [B, 1, V] after each prompt (of every position [B, T, V] if asked) and the KV of the prompts."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        cache = DynamicCache(config=self.config)
        # Padding is on the right, where causal attention never looks: no mask is needed, which is the fastest kernel.
        self._last = None if every_position else lengths - 1
        try:
            logits = self.module(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        finally:
            self._last = None
        return logits.float(), cache

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] after one more token in rows 0..B-1 of the cache. int64 [B], int64 [B]."""
        mask = self.cache.begin_step(positions)
        output = self.module(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, 0].float()


def _check_attention(config: object, max_context_tokens: int) -> None:
    """Refuses models whose attention this cache does not keep."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError("the embedded engine knows full attention only", field="layer_types", value=sorted(kinds))
    if window is not None and window < max_context_tokens:
        raise ConfigError(
            "the model's attention window is shorter than the context",
            field="--max-context-tokens",
            value=max_context_tokens,
            remedy=f"at most {window} with this model",
        )


def _eos_ids(*holders: object) -> list[int]:
    found: set[int] = set()
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return sorted(found)
