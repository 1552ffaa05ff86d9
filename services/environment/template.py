"""Tokenises conversations with the model's own chat template.

A conversation that continues keeps its tokens; only the new messages are rendered. Their text is
what the template writes after a made-up answer, so it does not matter how the template changes
earlier answers (strips thoughts, reformats tool calls). `Template` verifies on the model's template
that this text depends only on the new messages, or refuses with the reason.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jinja2 import TemplateError

from common.errors import ConfigError, InvalidInput
from services.environment.messages import Message

_MARK = "Zq7Answer7qZ"
"""The text of a made-up answer; no template writes it by itself."""
_NEW_TEXTS = ("Xj5News5jX", "Yk6News6kY")


def _tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probes.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "Text."}},
                "required": ["x"],
            },
        },
    }


_TOOL = _tool("probe_tool")
_OTHER_TOOL = _tool("other_probe")


class Template:
    """The chat template of a tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        stop_token_ids: the tokens that end an answer.

    Raises:
        ConfigError: the model has no chat template, or one that cannot continue a conversation
            token by token.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._encode = _encoder(tokenizer)
        self._repeats_tools = True
        """Whether the text that the template writes after an answer depends on the tools."""
        self._stop_tokens = {tokenizer.decode([token]): token for token in stop_token_ids}
        """The tokens that end an answer, by their text."""
        self.name = str(tokenizer.name_or_path)
        if not tokenizer.chat_template:
            raise self._refused("the model has none")
        self.takes_tools = self._verify()

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of a new conversation, up to the answer. Raises InvalidInput when the
        template refuses it.
        """
        return self._encode(self._render(messages, tools))

    def continuation(
        self, answer: Message, new: Sequence[Message], tools: Sequence[dict[str, Any]], ended: bool
    ) -> list[int] | None:
        """Returns the tokens between an answer and the next; None if the template does not write
        one after the other.

        Args:
            answer: the last recorded answer, whose tool calls the new messages may refer to.
            new: the messages after it.
            tools: the functions offered.
            ended: whether the answer's sampled tokens end with a stop token; else the template's
                own is added first.
        """
        # Where the tools do not change the text, one short tool renders faster than the real ones.
        rendered_tools = tools if self._repeats_tools or not tools else [_TOOL]
        ending = self._after(_stand_in(answer), new, rendered_tools)
        if ending is None:
            return None
        stop, text = ending
        ids = self._encode(stop + text)  # with the stop token, so that no token merges across it
        if not ids or ids[0] != self._stop_tokens[stop]:
            return None
        return ids[1:] if ended else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of sampled tokens, without the stop token at their end."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_tokens.values():
            ids.pop()
        return self.text(ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, unchanged."""
        ids = np.asarray(token_ids, np.int32)  # a list would be checked item by item
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], asks: bool = True
    ) -> str:
        """Returns the text of a conversation, and if it `asks`, the start of the next answer."""
        try:
            text = self._tokenizer.apply_chat_template(
                [message.fields for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=asks,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(
                f"the model's chat template rejects the messages: {error}",
                field="messages",
                remedy="see the template of the model",
            ) from None
        return str(text)

    def _after(
        self,
        answer: Message,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        before: Sequence[Message] = (),
    ) -> tuple[str, str] | None:
        """Returns the text of the stop token after `answer`, and all text after it; None if there
        is no stop token.
        """
        whole = self._render([*(before or [_user("x")]), answer, *new], tools)
        mark = whole.rfind(_MARK)
        if mark < 0:
            return None

        places = {stop: whole.find(stop, mark) for stop in self._stop_tokens}
        written = [(place, stop) for stop, place in places.items() if place >= 0]
        if not written:
            return None
        place, stop = min(written)
        return stop, whole[place + len(stop) :]

    def _verify(self) -> bool:
        """Returns whether the template writes tools. Raises ConfigError when it cannot continue a
        conversation.
        """
        question = [_user("x")]
        silent = self._render(question, [], asks=False)
        asking = self._render(question, [])
        if not asking.startswith(silent) or asking == silent:
            raise self._refused("it writes nothing that starts an answer")
        answer_start = asking[len(silent) :]

        answer = _stand_in(Message({"role": "assistant", "content": ""}))
        messages = [_user(text) for text in _NEW_TEXTS]
        self._check(answer, messages[:1], [], answer_start)
        with suppress(InvalidInput):  # some templates allow no two of the user
            self._check(answer, messages, [], answer_start)

        calling, results = _tool_exchange()
        try:
            if "probe_tool" not in self._render(question, [_TOOL]):
                return False
            self._check(calling, results, [_TOOL], "")
        except InvalidInput:
            return False

        continuations = (
            (calling, results),
            (calling, [*results, *question]),
            (answer, question),
        )
        with suppress(InvalidInput):  # some templates allow no user message there
            self._repeats_tools = any(
                self._after(last, new, [_TOOL]) != self._after(last, new, [_OTHER_TOOL])
                for last, new in continuations
            )
        return True

    def _check(
        self, answer: Message, new: list[Message], tools: list[dict[str, Any]], answer_start: str
    ) -> None:
        """Raises ConfigError unless the text after an answer is the new messages, whatever came
        before; InvalidInput when the template refuses them.
        """
        earlier = Message(
            {"role": "assistant", "content": "earlier", "reasoning_content": "thought"}
        )
        short = [_user("x")]
        long = [_user("another, longer question"), earlier, _user("y")]
        after_short = self._after(answer, new, tools, short)
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

        whole_ids = self._encode(self._render([*short, answer, *new], tools))
        ids = self._encode(stop + text)
        starts_with_stop = bool(ids) and ids[0] == self._stop_tokens[stop]
        if not starts_with_stop or whole_ids[-len(ids) :] != ids:
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


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Returns a function that tokenises text: the tokenizer's core, three times as fast, if its
    tokens are the same.
    """

    def whole(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    probe = f"{_MARK}  é\n{''.join(tokenizer.all_special_tokens)} x\n"
    expected = whole(probe)  # first: it switches off truncation and padding of the core
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or core.encode(probe, add_special_tokens=False).ids != expected:
        return whole
    return lambda text: list(core.encode(text, add_special_tokens=False).ids)


def _user(text: str) -> Message:
    return Message({"role": "user", "content": text})


def _stand_in(answer: Message) -> Message:
    """Returns a made-up answer with the tool calls of `answer`: templates read their names and ids
    for later messages.
    """
    fields: dict[str, Any] = {"role": "assistant", "content": _MARK}
    if answer.tool_calls:
        fields["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": {"x": _MARK}}}
            for call in answer.tool_calls
        ]
    return Message(fields)


def _tool_exchange() -> tuple[Message, list[Message]]:
    """Returns a made-up answer with two tool calls, and their results."""
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for number, text in enumerate(_NEW_TEXTS, start=1):
        identifier = f"call{number:05}"
        function = {"name": "probe_tool", "arguments": {}}
        calls.append({"id": identifier, "type": "function", "function": function})
        fields = {"role": "tool", "content": text, "tool_call_id": identifier, "name": "probe_tool"}
        results.append(Message(fields))
    answer = Message({"role": "assistant", "content": "", "tool_calls": calls})
    return _stand_in(answer), results
