"""Turns problems into prompts: the only place where a data row becomes the text and the tokens of a
prompt.

    problem ──data.prompt_template──► text ──the chat template, if one is used──► prompt
    ──sampling.prefill──► token ids

Training, evaluation, the Python API and supervised fine-tuning all call `prompt_text` or a
`Prompter`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError

from common.errors import ConfigError, did_you_mean
from common.prompts.answer_text import OPENED_THOUGHT
from common.prompts.templates import filled
from common.settings.chat_templates import variables
from common.settings.config import Config
from common.wire.schemas import Prompt


@dataclass(frozen=True)
class PromptStyle:
    """The settings that determine how problems become prompts."""

    template: str = ""
    """The text of `data.prompt_template`, with `{question}`. Empty: the problem alone."""
    chat: bool | None = None
    """Whether to apply a chat template. None: if the tokenizer has one."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    system_prompt: str = ""
    prefill: str = ""
    """Text with which every answer starts; part of the prompt."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Returns the style of a run; `data.prompt_template` replaces the chat template unless one
        is set.
        """
        template = config.data.prompt_template
        sampling = config.sampling
        return cls(
            template=template,
            chat=bool(config.model.chat_template) or (False if template else None),
            chat_template_kwargs=sampling.chat_template_kwargs,
            system_prompt=sampling.system_prompt,
            prefill=sampling.prefill,
        )

    def is_chat(self, tokenizer: Any) -> bool:
        """Whether prompts are chats with this tokenizer."""
        return bool(tokenizer.chat_template) if self.chat is None else self.chat

    def check(self, tokenizer: Any) -> None:
        """Raises ConfigError for settings that this tokenizer does not support."""
        if not tokenizer.chat_template or not self.is_chat(tokenizer):
            needs_template = {
                "sampling.system_prompt": self.system_prompt,
                "sampling.chat_template_kwargs": self.chat_template_kwargs,
                "model.chat_template": "own" if self.chat else "",
            }
            for name, value in needs_template.items():
                if value:
                    raise ConfigError(
                        "this setting needs a chat template, and the model has none, or "
                        "data.prompt_template replaces it",
                        field=name,
                        value=value,
                        remedy="leave it out and put the text into data.prompt_template, set "
                        "model.chat_template to a Jinja template, or use an instruct model",
                    )
        elif isinstance(tokenizer.chat_template, str):
            known = variables(tokenizer.chat_template) if self.chat_template_kwargs else ()
            for name, value in self.chat_template_kwargs.items():
                if name not in known:
                    hint = did_you_mean(name, [], known)
                    raise ConfigError(
                        f"the chat template does not read {name}",
                        field="sampling.chat_template_kwargs",
                        value={name: value},
                        remedy=f"{hint} it reads {', '.join(sorted(known))}".strip(),
                    )


def prompt_text(prompt: Prompt, style: PromptStyle, tokenizer: Any) -> str:
    """Returns the text of a prompt, prefill included. Raises ConfigError that names the setting or
    the problem.

    A chat of several messages needs a chat template; `data.prompt_template` writes one message.
    """
    text = filled(style.template, prompt)
    if style.is_chat(tokenizer):
        messages = conversation(prompt, style.system_prompt, text)
        return _rendered(messages, style, tokenizer) + style.prefill
    if prompt.chat and not (style.template and len(prompt.chat) == 1):
        one_message = "data.prompt_template writes only one message"
        no_template = "the model has no chat template"
        raise ConfigError(
            f"a problem is a chat, but {one_message if style.template else no_template}",
            field="model.chat_template",
            value=tokenizer.name_or_path,
            remedy="set a chat template, use an instruct model, or give problems as text",
        )
    return text + style.prefill


def text_ids(texts: Sequence[str], style: PromptStyle, tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of several texts that begin with a prompt, for which one tokenizer call
    costs hardly more than for one.

    A chat's text already has its special tokens. Any other text gets the special tokens that the
    tokenizer prepends, unless it begins with them, and none at the end.
    """
    plain: list[list[int]] = tokenizer(texts, add_special_tokens=False).input_ids
    if style.is_chat(tokenizer):
        return plain
    whole: list[list[int]] = tokenizer(texts).input_ids
    return [_without_end(marked, bare) for marked, bare in zip(whole, plain, strict=True)]


def answered_text(
    prompt: Prompt, answer: Mapping[str, Any], style: PromptStyle, tokenizer: Any
) -> tuple[str, str]:
    """Returns the text of a prompt, and the answer as the model would write it, with what the chat
    template appends.

    `answer` is the assistant's message. Raises ConfigError when it calls tools and the template
    does not write its calls.
    """
    before = prompt_text(prompt, style, tokenizer)
    calls = answer.get("tool_calls", ())
    if style.is_chat(tokenizer):
        text = filled(style.template, prompt)
        chat = [*conversation(prompt, style.system_prompt, text), dict(answer)]
        whole = _rendered(chat, style, tokenizer, open_end=False)
        written = whole[len(before) :]
        is_written = all(str(call["function"]["name"]) in written for call in calls)
        if whole.startswith(before) and is_written:
            return before, written
    if calls:
        raise ConfigError(
            "the model's chat template does not write tool calls",
            field="model.chat_template",
            value=tokenizer.name_or_path,
            remedy="use a model whose template does, or set a template that writes them",
        )
    return before, str(answer["content"]).removeprefix(style.prefill)


def conversation(prompt: Prompt, system_prompt: str, text: str) -> list[dict[str, str]]:
    """Returns a new list of the messages that the model continues; the last one, a user's or a
    tool's, has the content `text`.
    """
    last = prompt.chat[-1] if prompt.chat else {"role": "user"}
    chat = [*prompt.chat[:-1], {**last, "content": text}]
    if not system_prompt or chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system_prompt}, *chat]


class TokenisedPrompt(NamedTuple):
    """A prompt as the engines get it."""

    token_ids: list[int]
    answer_start: str
    """The end of its text that belongs to the answer: the mark that opens a thought, if the
    template ends with one, and the prefill."""


@dataclass
class Prompter:
    """The prompts of a run: a tokenizer, a style, and the tokens that end an answer.

    Raises ConfigError for a style that does not fit the tokenizer.
    """

    tokenizer: Any
    style: PromptStyle
    stop_token_ids: list[int]
    vocabulary: int | None = None
    """Number of tokens that the model knows; None if that is not known here."""

    def __post_init__(self) -> None:
        self.style.check(self.tokenizer)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt; see `prompt_text` and `text_ids`."""
        return self.tokenised([prompt])[0].token_ids

    def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
        """Returns several prompts, each rendered once. Raises ConfigError for a token that the
        model lacks.
        """
        texts = [prompt_text(prompt, self.style, self.tokenizer) for prompt in prompts]
        found = text_ids(texts, self.style, self.tokenizer)
        tokenised: list[TokenisedPrompt] = []
        for prompt, text, token_ids in zip(prompts, texts, found, strict=True):
            largest = max(token_ids, default=0)
            if self.vocabulary is not None and largest >= self.vocabulary:
                shown = self.tokenizer.decode([largest])
                raise ConfigError(
                    f"the prompt of {prompt.id} has the token {largest} ({shown!r}), but the model "
                    f"knows only {self.vocabulary}",
                    field="model.name",
                    value=self.tokenizer.name_or_path,
                    remedy="call model.resize_token_embeddings(len(tokenizer)) and save both, or "
                    "use the model's own tokenizer",
                )
            opened = OPENED_THOUGHT.search(text.removesuffix(self.style.prefill))
            start = (opened[0] if opened else "") + self.style.prefill
            tokenised.append(TokenisedPrompt(token_ids, start))
        return tokenised


def _rendered(
    chat: Sequence[Mapping[str, Any]], style: PromptStyle, tokenizer: Any, open_end: bool = True
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=open_end,
                **style.chat_template_kwargs,
            )
        )
    except (TemplateError, TypeError, ValueError) as error:
        # A template may refuse a role or the value of a variable.
        raise ConfigError(
            "the chat template cannot be applied to the messages "
            f"{', '.join(message['role'] for message in chat)}: {error}",
            field="model.chat_template",
            value=tokenizer.name_or_path,
            remedy="leave out what it does not support (a system prompt, chat_template_kwargs), or "
            "set another template",
        ) from None


def _without_end(marked: list[int], bare: list[int]) -> list[int]:
    """Returns the token ids of a text with special tokens (`marked`) without those that the
    tokenizer appends, and without prepended ones that the text itself (`bare`) begins with.
    """
    for start in range(len(marked) - len(bare) + 1):
        if marked[start : start + len(bare)] == bare:
            before = marked[:start]
            return bare if bare[:start] == before else before + bare
    return marked
