"""Tiny random models of the families that people train, each with its family's kind of tokenizer
and chat template."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.models.tiny_models import make

CORPUS = [
    "Tom has 3 apples and buys 4 more apples. How many apples now?",
    "#### 7",
    "user assistant system think",
]
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3 = _CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family: its architecture, and how its tokenizer works."""

    kind: str
    """A kind of `tests.support.models.tiny_models`, or a model type of transformers."""
    template: str
    special: tuple[str, ...]
    """Special tokens; the last one ends a turn."""
    bos: str | None = None
    pieces: bool = False
    """SentencePiece pieces with byte fallback, instead of BPE over bytes."""
    more: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Writes model and tokenizer."""
        tokenizer = self.tokenizer()
        ids = {
            "vocab_size": len(tokenizer) + 5,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
        }
        model = make(
            self.kind,
            seed,
            **ids,
            **self.more,
            pad_token_id=tokenizer.eos_token_id,
            max_position_embeddings=256,
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Returns the tokenizer, trained on a few words."""
        special = [*([self.bos] if self.bos else []), *self.special]
        if self.pieces:
            made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))  # a token of text  # noqa: S106
            made.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            parts: list[Any] = [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
            made.decoder = decoders.Sequence(parts)
            trainer = trainers.BpeTrainer(
                vocab_size=120, special_tokens=["<unk>", *special], show_progress=False
            )
        else:
            made = Tokenizer(models.BPE())
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(
                vocab_size=300,
                special_tokens=special,
                initial_alphabet=alphabet,
                show_progress=False,
            )
        made.train_from_iterator(CORPUS, trainer)
        if self.pieces:
            state = json.loads(made.to_str())
            vocabulary = state["model"]["vocab"]
            vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
            made = Tokenizer.from_str(json.dumps(state))
        if self.bos:
            number = made.token_to_id(self.bos)
            made.post_processor = processors.TemplateProcessing(
                single=f"{self.bos} $A", special_tokens=[(self.bos, number)]
            )
        named: dict[str, Any] = {"bos_token": self.bos, "eos_token": self.special[-1]}
        return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=self.template, **named)


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TIED = {"tie_word_embeddings": True}
FAMILIES = {
    "Qwen2.5": Family("Qwen2", _CHATML, _IM),
    "Qwen3": Family("Qwen3", _QWEN3, ("<think>", "</think>", *_IM)),
    "Llama 3": Family(
        "Llama 3",
        _LLAMA3,
        ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
    ),
    "Mistral": Family("Mistral", _MISTRAL, ("[INST]", "[/INST]", "</s>"), "<s>", pieces=True),
    "Gemma 3": Family(
        "Gemma 3 text", _GEMMA, ("<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", pieces=True
    ),
    "SmolLM2": Family("llama", _CHATML, _IM, more=_TIED),
    "SmolLM3": Family(
        "smollm3", _CHATML, ("<think>", "</think>", *_IM), more={"num_hidden_layers": 4, **_TIED}
    ),
    "Phi-3": Family(
        "Phi-3",
        _PHI3,
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<s>",
        pieces=True,
    ),
}
