"""A tokenizer that tokenises text differently from the sampled tokens, chat templates, and scripted
engines."""

import string
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.errors import ServiceError
from common.wire.schemas import Completion, EpisodeLimits, FinishReason, Int32
from services.environment.session import Session
from services.environment.template import Template

END = "<|endoftext|>"
START = "<|im_start|>"
TURN_END = "<|im_end|>"
_MERGES = [("a", "b"), ("b", "a"), ("ab", "ab"), ("\n", "\n"), ("=", "="), ("o", "k")]
"""`aba` tokenises as ab a or a ba; a newline from the template would merge with a preceding one."""


def _chatml(answer: str) -> str:
    """Returns a template like Qwen's, with the expression `answer` for the text of an answer."""
    lines = [
        "{% if tools %}{{ '<|im_start|>system\\nTools:' }}",
        "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}",
        "{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}",
        "{% if message.role == 'tool' %}",
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}",
        "{{ '<|im_start|>user' }}{% endif %}",
        "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}",
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}",
        "{{ '<|im_end|>\\n' }}{% endif %}",
        "{% else %}{{ '<|im_start|>' + message.role + '\\n' }}",
        f"{{{{ ({answer}) if message.role == 'assistant' else message.content }}}}",
        "{% for call in message.tool_calls or [] %}",
        '{{ \'\\n<tool_call>\\n\' }}{"name": "{{ call.function.name }}", ',
        "\"arguments\": {{ call.function.arguments | tojson }}}{{ '\\n</tool_call>' }}{% endfor %}",
        "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ]
    return "".join(lines)


CHATML = _chatml("message.content")
"""Qwen2.5's form of conversations."""
STRIPS = _chatml(
    "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' "
    "if loop.last and message.reasoning_content else '') "
    "+ message.content.split('</think>')[-1].lstrip('\\n')"
)
"""Like Qwen3's template, keeps thoughts only in the newest answer."""


def trap_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of characters with a few merges."""
    alphabet = [*string.printable, "é"]
    vocabulary = {
        token: i
        for i, token in enumerate([END, START, TURN_END, *alphabet, *(a + b for a, b in _MERGES)])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\x00", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END, chat_template=template
    )
    made.add_special_tokens({"additional_special_tokens": [START]})
    return made


def letters(tokenizer: PreTrainedTokenizerFast, text: str, end: bool = True) -> list[int]:
    """Returns one token per character, unlike any tokenizer, and the end of the turn."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(text))
    return [*ids, tokenizer.eos_token_id] if end else ids


class ScriptedEngine:
    """Answers calls with the given tokens in order and records the calls. Raises an exception found
    in the script."""

    def __init__(self, script: Sequence[list[int] | ServiceError], stop: int) -> None:
        self._script = list(script)
        self._stop = stop
        self.asked: list[list[int]] = []
        self.version = 0
        self.seeds: list[int] = []

    async def __call__(
        self, tokens: Int32, max_new_tokens: int, seed: int, stop: Sequence[str]
    ) -> Completion:
        self.asked.append(tokens.tolist())
        self.seeds.append(seed)
        answer = self._script.pop(0)
        if isinstance(answer, ServiceError):
            raise answer
        ids = answer[:max_new_tokens]
        logprobs = -0.1 - 0.01 * np.arange(len(ids), dtype=np.float32)
        finish: FinishReason = "stop" if ids[-1] == self._stop else "length"
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=logprobs,
            finish_reason=finish,
            weight_versions=[(self.version, 0, len(ids))],
        )


def trap_session(
    script: Sequence[str | list[int] | ServiceError],
    template: str = CHATML,
    limits: EpisodeLimits | None = None,
    most: int = 400,
) -> tuple[Session, ScriptedEngine, PreTrainedTokenizerFast]:
    """Returns a session whose engine answers with the texts of `script`, letter by letter."""
    tokenizer = trap_tokenizer(template)
    answers = [letters(tokenizer, each) if isinstance(each, str) else each for each in script]
    engine = ScriptedEngine(answers, tokenizer.eos_token_id)
    template_of_model = Template(tokenizer, [tokenizer.eos_token_id])
    limits = limits or EpisodeLimits()
    session = Session("s", template_of_model, engine, limits=limits, max_new_tokens=most)
    return session, engine, tokenizer
