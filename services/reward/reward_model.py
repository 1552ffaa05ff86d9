"""A reward model. This module and `device` are the only ones of the reward-server that need torch,
and only when they are used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.models.hub import check_model, refuse_random
from services.reward.functions.base import (
    Completions,
    DetailedRewardFunction,
    Message,
    Score,
    Scores,
    column,
)

_FIELD = "reward.functions.reward_model.model"


class RewardModelFunction(DetailedRewardFunction):
    """The score of a Hugging Face sequence-classification model: its logit, or the probability of
    the second of two classes.

    It formats the problem (`prompt`) and the completion with the model's chat template, or as a
    pair of texts if it has none. A chat over the limit has no score. It computes in bfloat16 on a
    GPU if there is one, else in float32 on the CPU.

    Args:
        model: a name on the hub or a local directory.
        batch_size: chats per forward pass.
        max_tokens: longest chat.

    Raises:
        ConfigError: the model cannot be loaded or has more than two outputs, or an assigned GPU
            cannot be used (`choose_device`).
    """

    name = "reward_model"
    bounds_itself = True

    def __init__(self, model: str, batch_size: int = 8, max_tokens: int = 4096) -> None:
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

        except ImportError as error:
            raise ConfigError(
                f"a reward model needs torch and transformers: {error}",
                field="reward.functions",
                value="reward_model",
                remedy="pip install 'rlhf-math[trainer]'",
            ) from None
        from learning.device import choose_device, dtype_on

        self._torch = torch
        self._device = choose_device("auto", "device")
        if Path(model).is_dir():
            check_model(model, _FIELD)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            loaded, found = AutoModelForSequenceClassification.from_pretrained(
                model,
                dtype=dtype_on(self._device, "bfloat16"),
                use_safetensors=True,
                output_loading_info=True,
            )
            refuse_random(found["missing_keys"])
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the reward model cannot be loaded: {error}",
                field=_FIELD,
                value=model,
                remedy="name a sequence-classification model on the hub "
                "(set HF_TOKEN for a gated one) or its directory",
            ) from None
        if loaded.config.num_labels > 2:
            raise ConfigError(
                f"a model with {loaded.config.num_labels} classes gives no score",
                field=_FIELD,
                value=model,
                remedy="use a model with a single output, or with two classes",
            )

        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if loaded.config.pad_token_id is None:  # the model uses it to find the end of a chat
            loaded.config.pad_token_id = self._tokenizer.pad_token_id
        self._tokenizer.padding_side = "right"
        self._model = loaded.to(self._device).eval()
        positions = getattr(loaded.config, "max_position_embeddings", max_tokens)
        self._batch_size = batch_size
        self._max_tokens = min(max_tokens, positions)

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns the score of each chat, an error for one over the limit. Raises InvalidInput
        without the column `prompt`.
        """
        prompts = column(kwargs, "prompt", len(completions), self.name)
        chats = list(map(self._token_ids, prompts, completions))
        too_long = Score(None, "error", reason=f"the chat is longer than {self._max_tokens} tokens")
        scores = [too_long] * len(chats)
        fitting = [i for i, ids in enumerate(chats) if len(ids) <= self._max_tokens]
        fitting.sort(key=lambda i: len(chats[i]))  # chats of similar length share a forward pass
        for start in range(0, len(fitting), self._batch_size):
            batch = fitting[start : start + self._batch_size]
            values = self._forward([chats[i] for i in batch])
            for i, value in zip(batch, values, strict=True):
                scores[i] = Score(value)
        return scores

    def _token_ids(self, prompt: str | list[Message], completion: list[Message]) -> list[int]:
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template([*before, *completion], tokenize=False)
            # The template has added special tokens.
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = self._tokenizer(_joined(before), _joined(completion)).input_ids
        assert isinstance(ids, list)
        return ids

    def _forward(self, chats: Sequence[list[int]]) -> list[float]:
        """Returns the score of each chat of token ids."""
        padded = self._tokenizer.pad({"input_ids": list(chats)}, return_tensors="pt")
        padded = padded.to(self._device)
        with self._torch.inference_mode():
            output = self._model(
                input_ids=padded["input_ids"],  # [chats, longest]
                attention_mask=padded["attention_mask"],
            )
        logits = output.logits.float()  # [chats, 1 or 2]
        values = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, 1]
        return [float(value) for value in values]


def _joined(chat: list[Message]) -> str:
    return "\n".join(message["content"] for message in chat)
