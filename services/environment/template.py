"""Tokenises conversations with the model's own chat template.

A conversation that continues keeps its tokens; only the new messages are rendered. Their text is
what the template writes after a made-up answer, so it does not matter how the template changes
earlier answers (strips thoughts, reformats tool calls). `Template` verifies on the model's template
that this text depends only on the new messages, or refuses with the reason.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2 import TemplateError

from common import Json
from common.errors import ConfigError, InvalidInput, shorten
from common.models.hub import check_model
from common.settings.chat_templates import OWN
from common.settings.sections import ModelSection
from common.wire.schemas import Int32
from services.environment.call_formats import FORMATS, HERMES, CallFormat, Parsed, parse_answer
from services.environment.messages import (
    Message,
    Tools,
    made_tool,
    made_tool_call,
    tool_message,
    user_message,
)

_MARK = "Zq7Answer7qZ"
"""The text of a made-up answer; no template writes it by itself."""
_QUESTION = (user_message("x"),)
"""A made-up conversation."""
_NEW_TEXTS = ("Xj5News5jX", "Yk6News6kY")
_ARGUMENTS: tuple[Json, ...] = (
    {"x": "12", "n": 3, "flag": True, "items": ["a", {"k": 1.5}]},
    {"x": 'say "hi"\n{2}', "n": -4, "flag": False, "items": []},
)
"""Arguments of two made-up calls, which the template writes and the gateway has to read back."""
_PROMPTS = 64
"""Prompts whose tokens are kept."""
_IDS = ("call{:05}", "functions.probe_tool:{}")
"""Ids of made-up calls: as Mistral's templates want them, and as Kimi K2 reads the name in them."""


_TYPES = {"x": "string", "n": "integer", "flag": "boolean", "items": "array"}
_TOOL = made_tool(
    "probe_tool",
    "Probes.",
    {
        "type": "object",
        "properties": {
            name: {"type": kind, "description": "Probes.", "items": {}}
            for name, kind in _TYPES.items()
        },
        "required": ["x"],
    },
)


class Template:
    """The chat template of a tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        stop_token_ids: the tokens that end an answer.
        variables: further variables of the template (`sampling.chat_template_kwargs`).

    Raises:
        ConfigError: the model has no chat template, or one that cannot continue a conversation
            token by token.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend_of(tokenizer)
        # The episodes of a group begin alike.
        self._prompt_tokens = lru_cache(_PROMPTS)(self._encode)
        self._variables = variables
        self._stop_tokens = {tokenizer.decode([token]): token for token in stop_token_ids}
        """The tokens that end an answer, by their text."""
        self.name = str(tokenizer.name_or_path)
        if not tokenizer.chat_template:
            raise self._refused("the model has none")
        self.call_format: CallFormat = HERMES
        """How the model writes thoughts and tool calls."""
        self._arguments_are_text = False
        """Whether the template takes a call's arguments only as JSON text."""
        self.no_tools = self._verify()
        """Why tools cannot be used; empty if they can."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Returns the tokens of a new conversation, up to the answer. Raises InvalidInput when the
        template refuses it.
        """
        return list(self._prompt_tokens(self._render(messages, tools)))

    def continuation(
        self,
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        *,
        sampled: Int32,
    ) -> list[int] | None:
        """Returns the tokens between an answer and the next; None if the template does not write
        one after the other.

        Args:
            answer: the last recorded answer, whose tool calls the new messages may refer to.
            new: the messages after it.
            tools: the functions offered.
            sampled: the answer's tokens. If they do not end with a stop token, the template's own
                is added first.
        """
        ending = self._after(_stand_in(answer), new, tools)
        if ending is None:
            return None
        ids = self._tokens(*ending)
        if ids is None:
            return None
        ended = len(sampled) > 0 and int(sampled[-1]) in self._stop_tokens.values()
        return ids[1:] if ended else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of sampled tokens, without the stop token at their end."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_tokens.values():
            ids.pop()
        return self.text(ids)

    def parse(self, text: str, tools: Tools, answer: int = 0) -> Parsed:
        """Returns the message in the text of an answer, which is the session's `answer`th."""
        return parse_answer(text, tools, self.call_format, answer)

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return _encoded(self._tokenizer, text)

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, unchanged."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=False))
        return _decoded(self._tokenizer, token_ids)

    def _render(self, messages: Sequence[Message], tools: Tools, asks: bool = True) -> str:
        """Returns the text of a conversation, and if it `asks`, the start of the next answer."""
        try:
            text = self._tokenizer.apply_chat_template(
                [self._fields(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=asks,
                **self._variables,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(
                f"the model's chat template rejects the messages: {error}",
                field="messages",
                remedy="see the template of the model",
            ) from None
        return str(text)

    def _fields(self, message: Message) -> Json:
        """Returns a message as the template takes it."""
        if not (self._arguments_are_text and message.tool_calls):
            return message.fields
        calls = []
        for call in message.tool_calls:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(made_tool_call(call["id"], call["function"]["name"], arguments))
        return message.fields | {"tool_calls": calls}

    def _after(
        self,
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        before: Sequence[Message] = _QUESTION,
    ) -> tuple[str, str] | None:
        """Returns the text of the stop token after `answer`, and all text after it; None if there
        is no stop token.
        """
        whole = self._render([*before, answer, *new], tools)
        mark = whole.rfind(_MARK)
        if mark < 0:
            return None
        _, stop, text = cut(whole[mark:], self._stop_tokens)
        return (stop, text) if stop else None

    def _tokens(self, stop: str, text: str) -> list[int] | None:
        """Returns the tokens of a stop token and the text after it, tokenised as one, so that no
        token merges across the two; None if they do not begin with the stop token.
        """
        ids = self._encode(stop + text)
        return ids if ids and ids[0] == self._stop_tokens[stop] else None

    def _verify(self) -> str:
        """Returns why tools cannot be used, or nothing. Raises ConfigError when the template cannot
        continue a conversation.
        """
        answer = _stand_in(Message({"role": "assistant", "content": ""}))
        try:
            silent = self._render(_QUESTION, [], asks=False)
            asking = self._render(_QUESTION, [])
            whole = self._render([*_QUESTION, answer], [], asks=False)
        except InvalidInput as error:
            raise self._refused(error.message) from None
        # Phi-3's ends with another token when it does not ask. Mistral's answers begin right after
        # the question, without anything that starts them.
        answer_start = asking[len(_common(asking, silent)) :]
        if not answer_start and not whole[len(asking) :].lstrip().startswith(_MARK):
            raise self._refused("it writes nothing that starts an answer")

        messages = [user_message(text) for text in _NEW_TEXTS]
        no_tools = self._verify_tools()
        # gpt-oss ends a final answer in the history otherwise than the engine does. Its calls
        # continue; a message of the user begins a new sequence.
        ends = self._after(answer, messages[:1], []) is not None
        if ends or no_tools:
            self._check(answer, messages[:1], [], answer_start)
            with suppress(InvalidInput):  # some templates allow no two of the user
                self._check(answer, messages, [], answer_start)
        return no_tools

    def _verify_tools(self) -> str:
        """Chooses the format of calls; returns why tools cannot be used, or nothing."""
        try:
            if "probe_tool" not in self._render(_QUESTION, [_TOOL]):
                return "it does not write the tools into the prompt"
        except InvalidInput as error:
            return str(error)
        problems: list[str] = []
        # Some templates want arguments as text, or ids that carry the name of the tool; some write
        # one call in an answer.
        for attempt in product((False, True), _IDS, (2, 1)):
            self._arguments_are_text, identifier, count = attempt
            try:
                calling, results = self._choose_format(identifier, count)
                self._check(_stand_in(calling), results, [_TOOL], "")
                return ""
            except InvalidInput as error:
                problems.append(str(error))
        self._arguments_are_text = False
        return problems[1]  # of one ordinary call

    def _choose_format(self, identifier: str, count: int) -> tuple[Message, list[Message]]:
        """Chooses the format that reads back what the template writes for an answer with `count`
        calls; returns this answer, and the calls' results. Raises InvalidInput with the reason
        when there is none.
        """
        calls = [
            made_tool_call(identifier.format(number), "probe_tool", arguments)
            for number, arguments in enumerate(_ARGUMENTS[:count])
        ]
        answer = Message({"role": "assistant", "content": "", "tool_calls": calls})
        results = list(map(tool_message, _NEW_TEXTS, calls))
        whole = self._render([*_QUESTION, answer, *results], [_TOOL])

        # The answer begins where the two differ, and ends with a stop token. What asks for an
        # answer may begin like the mark of a call, which is then cut: so it is also read with what
        # the template writes before it.
        texts: list[str] = []
        for asks in (True, False):
            asking = self._render(_QUESTION, [_TOOL], asks)
            written, _, _ = cut(whole[len(_common(asking, whole)) :], self._stop_tokens)
            texts.append(written)
            if "probe_tool" not in written:
                raise InvalidInput("it writes no tool calls")
            expected = [call["function"] for call in calls]
            for call_format in FORMATS:
                message, _ = parse_answer(written, [_TOOL], call_format)
                if [call["function"] for call in message.tool_calls] == expected:
                    self.call_format = call_format
                    return answer, results
        raise InvalidInput(
            f"the tool calls that it writes cannot be read back: {shorten(texts[0])!r}"
        )

    def _check(
        self, answer: Message, new: list[Message], tools: list[Json], answer_start: str
    ) -> None:
        """Raises ConfigError unless the text after an answer is the new messages, whatever came
        before; InvalidInput when the template refuses them.
        """
        earlier = Message(
            {"role": "assistant", "content": "earlier", "reasoning_content": "thought"}
        )
        long = [user_message("another, longer question"), earlier, user_message("y")]
        after_short = self._after(answer, new, tools)
        after_long = self._after(answer, new, tools, long)

        if after_short is None or after_long is None:
            raise self._refused("it does not end an answer with a token at which the engines stop")
        if after_short != after_long:
            raise self._refused("what it writes after an answer depends on the messages before it")

        stop, text = after_short
        places = [text.find(message.content) for message in new]
        in_order = -1 not in places and places == sorted(places)
        if not in_order or not text.endswith(answer_start):
            raise self._refused("what it writes after an answer is not the new messages in order")

        whole_ids = self._encode(self._render([*_QUESTION, answer, *new], tools))
        ids = self._tokens(stop, text)
        if ids is None or whole_ids[-len(ids) :] != ids:
            raise self._refused(
                "its text after an answer gives other tokens alone than within the conversation"
            )

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the chat template of this model cannot be used for episodes: {reason}",
            field="model.name",
            value=self.name,
            remedy="use an instruct model whose template continues a conversation, or train without"
            " an environment",
        )


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    ids = np.asarray(token_ids, np.int32)  # a list would be checked item by item
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _backend_of(tokenizer: Any) -> Any:
    """Returns a copy of the tokenizer inside transformers' own, which costs a third of the time;
    None if there is none, or it gives other tokens or text.
    """
    backend = deepcopy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        return None
    # Whoever else uses the original may set these.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    probe = f"{_PROBE}{tokenizer.eos_token or ''}"
    ids = _encoded(tokenizer, probe)
    same_ids = backend.encode(probe, add_special_tokens=False).ids == ids
    same_text = backend.decode(ids, skip_special_tokens=False) == _decoded(tokenizer, ids)
    return backend if same_ids and same_text else None


_PROBE = "<s> It's 1 , 2 .\n\n  é ▁ 好 \U0001f600\t</s>\r\n<|im_start|> don't"
"""Where a tokenizer may differ from the one inside it: marks, blanks and what is cleaned up."""


def cut(text: str, stops: Iterable[str]) -> tuple[str, str, str]:
    """Returns a text before its first stop text, that stop text, and the text after it. Without
    one, the whole text comes before.
    """
    places = [(text.find(stop), stop) for stop in stops]
    found = [(place, stop) for place, stop in places if place >= 0]
    place, stop = min(found, default=(len(text), ""))
    return text[:place], stop, text[place + len(stop) :]


def _common(one: str, other: str) -> str:
    """Returns the text with which both begin."""
    return os.path.commonprefix([one, other])  # noqa: RUF071 - of characters


def _stand_in(answer: Message) -> Message:
    """Returns a made-up answer with the tool calls of `answer`: templates read their names and ids
    for later messages.
    """
    fields: Json = {"role": "assistant", "content": _MARK}
    if answer.tool_calls:
        # The calls carry the mark: Gemma 4 writes the content after the results.
        fields["content"] = ""
        fields["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": {"x": _MARK}}}
            for call in answer.tool_calls
        ]
    return Message(fields)


def load_template(config: ModelSection, variables: Mapping[str, Any]) -> tuple[Template, list[int]]:
    """Returns the template of `config.name`, and the tokens that end an answer. Raises ConfigError.

    Never imports torch: the tokenizer does not need it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer, GenerationConfig  # slow to import

    check_model(config.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.name, trust_remote_code=config.trust_remote_code
        )
        if config.chat_template not in ("", OWN):
            tokenizer.chat_template = config.chat_template
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"the tokenizer cannot be loaded: {reason}",
            field="model.name",
            value=config.name,
            remedy="name a model with a tokenizer, or set HF_TOKEN",
        ) from None

    try:
        eos_token_id = GenerationConfig.from_pretrained(config.name).eos_token_id
    except OSError:  # the model has no such file
        eos_token_id = None
    # It is a token, a list of tokens or None.
    candidates = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    stop_token_ids = sorted({*candidates, tokenizer.eos_token_id} - {None})
    if not stop_token_ids:
        raise ConfigError(
            "the model has no end-of-sequence token",
            field="model.name",
            value=config.name,
            remedy="set eos_token_id in its generation_config.json",
        )
    return Template(tokenizer, stop_token_ids, variables), stop_token_ids
