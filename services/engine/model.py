"""The model and its tokenizer: prefill of prompts, one decode step for all running rows."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.errors import ConfigError
from services.engine.cache import SlotCache

log = logging.getLogger(__name__)
_ATTENTION = "rollout_decode"


class Model:
    """A transformers causal language model with full attention, in float32, from a local directory.

    Raises ConfigError when the directory holds no such model.
    """

    def __init__(self, path: Path, max_context_tokens: int) -> None:
        if not (path / "config.json").is_file():
            raise ConfigError("there is no model", field="--model-path", value=path, remedy="name a directory with config.json")
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
            loaded.set_attn_implementation(_ATTENTION)
        self.cache = SlotCache(self.config.num_hidden_layers)
        self._last: Tensor | None = None
        loaded.get_output_embeddings().register_forward_pre_hook(self._only_last)

    def _only_last(self, _: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Passes only the last position of each prompt to lm_head (prompts of one batch differ in length)."""
        if self._last is None:
            return None
        hidden, *rest = arguments
        return (hidden[torch.arange(len(hidden)), self._last][:, None], *rest)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        """Returns the logits [B, V] after each prompt and the prompts' KV cache."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        cache = DynamicCache(config=self.config)
        # Padding is on the right, where causal attention never looks: no mask is needed, which is the fastest kernel.
        self._last = lengths - 1
        try:
            logits = self.module(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        finally:
            self._last = None
        return logits[:, 0].float(), cache

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits [B, V] after one more token in rows 0..B-1 of the cache; arguments are int64 [B]."""
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
    """Raises ConfigError for attention that the cache does not support."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError("the embedded engine supports full attention only", field="layer_types", value=sorted(kinds))
    if window is not None and window < max_context_tokens:
        reason = "the model's attention window is shorter than the context"
        remedy = f"at most {window} with this model"
        raise ConfigError(reason, field="--max-context-tokens", value=max_context_tokens, remedy=remedy)


def _eos_ids(*holders: object) -> list[int]:
    found: set[int] = set()
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return sorted(found)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Computes attention on a CPU: one query by plain batched products, in half the time of the fused kernel.

    Query [B, heads, T, D], key and value [B, kv_heads, L, D], additive mask [B, 1, 1, L]; T > 1 is a causal prefill.
    """
    if query.shape[2] > 1 or attention_mask is None or options.get("softcap") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    batch, heads, _, size = query.shape
    kv_heads = key.shape[1]
    scaling = options.get("scaling") or size**-0.5
    # Heads that share a key are rows of one product, so keys and values need no copies.
    packed = (query * scaling).view(batch, kv_heads, heads // kv_heads, size)
    weights = torch.softmax(packed @ key.transpose(2, 3) + attention_mask, -1)
    return (weights @ value).view(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(_ATTENTION, _attend)
