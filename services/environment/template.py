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
_NEWS = ("Xj5News5jX", "Yk6News6kY")


def _tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "string", "description": "Text."}},
        "required": ["x"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "Probes.", "parameters": parameters},
    }


_TOOL, _OTHER_TOOL = _tool("probe_tool"), _tool("other_probe")


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
        self._tokenizer, self._encoder = tokenizer, _encoder(tokenizer)
        self._repeats_tools = True
        """Whether the text that the template writes after an answer depends on the tools."""
        self._stops = {self._tokenizer.decode([token]): token for token in stop_token_ids}
        self.name = str(tokenizer.name_or_path)
        if not tokenizer.chat_template:
            raise self._refused("the model has none")
        self.takes_tools = self._verify()

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of a new conversation, up to the answer. Raises InvalidInput when the
        template refuses it.
        """
        return self._ids(self._render(messages, tools))

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
        shown = tools if self._repeats_tools or not tools else [_TOOL]
        found = self._after(_stand_in(answer), new, shown)
        if found is None:
            return None
        stop, text = found
        ids = self._ids(stop + text)  # with the stop token, so that no token merges across it
        if not ids or ids[0] != self._stops[stop]:
            return None
        return ids[1:] if ended else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of sampled tokens, without the stop token at their end."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stops.values():
            ids.pop()
        return self.text(ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, unchanged."""
        ids = np.asarray(token_ids, np.int32)  # a list would be checked item by item
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _ids(self, text: str) -> list[int]:
        return self._encoder(text)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], asks: bool = True
    ) -> str:
        chat = [message.fields for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    chat, tools=list(tools) or None, tokenize=False, add_generation_prompt=asks
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"the model's chat template rejects the messages: {error}"
            raise InvalidInput(
                reason, field="messages", remedy="see the template of the model"
            ) from None

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
        found = whole.rfind(_MARK)
        ends = (
            [(place, stop) for stop in self._stops if (place := whole.find(stop, found)) >= 0]
            if found >= 0
            else []
        )
        if not ends:
            return None
        place, stop = min(ends)
        return stop, whole[place + len(stop) :]

    def _verify(self) -> bool:
        """Returns whether the template writes tools. Raises ConfigError when it cannot continue a
        conversation.
        """
        asked, silent = self._render([_user("x")], []), self._render([_user("x")], [], asks=False)
        if not asked.startswith(silent) or asked == silent:
            raise self._refused("it writes nothing that starts an answer")
        plain = _stand_in(Message({"role": "assistant", "content": ""}))
        self._check(plain, [_user(_NEWS[0])], [], asked[len(silent) :])
        self._check(
            plain, [_user(_NEWS[0]), _user(_NEWS[1])], [], asked[len(silent) :], optional=True
        )
        calls = [
            {
                "id": f"call{i:05}",
                "type": "function",
                "function": {"name": "probe_tool", "arguments": {}},
            }
            for i in (1, 2)
        ]
        called = _stand_in(Message({"role": "assistant", "content": "", "tool_calls": calls}))
        results = [
            Message(
                {"role": "tool", "content": news, "tool_call_id": call["id"], "name": "probe_tool"}
            )
            for news, call in zip(_NEWS, calls, strict=True)
        ]
        try:
            if "probe_tool" not in self._render([_user("x")], [_TOOL]):
                return False
            self._check(called, results, [_TOOL], "")
        except InvalidInput:
            return False
        followed = [(called, results), (called, [*results, _user("x")]), (plain, [_user("x")])]
        with suppress(InvalidInput):  # some templates allow no user message there
            self._repeats_tools = any(
                self._after(*each, [_TOOL]) != self._after(*each, [_OTHER_TOOL])
                for each in followed
            )
        return True

    def _check(
        self,
        answer: Message,
        new: list[Message],
        tools: list[dict[str, Any]],
        asks: str,
        optional: bool = False,
    ) -> None:
        """Raises ConfigError unless the text after an answer is the new messages, whatever came
        before.
        """
        earlier = Message(
            {"role": "assistant", "content": "earlier", "reasoning_content": "thought"}
        )
        histories = ([_user("x")], [_user("another, longer question"), earlier, _user("y")])
        try:
            found = [self._after(answer, new, tools, before) for before in histories]
        except InvalidInput:
            if optional:
                return
            raise
        if None in found or found[0] is None:
            raise self._refused("it does not end an answer with a token at which the engines stop")
        stop, text = found[0]
        if found[0] != found[1]:
            raise self._refused("what it writes after an answer depends on the messages before it")
        places = [text.find(message.content) for message in new]
        if -1 in places or places != sorted(places) or not text.endswith(asks):
            raise self._refused("what it writes after an answer is not the new messages in order")
        whole = self._ids(self._render([*histories[0], answer, *new], tools))
        ids = self._ids(stop + text)
        if not ids or ids[0] != self._stops[stop] or whole[-len(ids) :] != ids:
            raise self._refused(
                "its text after an answer gives other tokens alone than within the conversation"
            )

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the chat template of this model cannot be used for episodes: {reason}",
            field="model.name",
            value=self.name,
            remedy="use an instruct model whose template continues a conversation, or train without an environment",
        )


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Returns a function that tokenises text: the tokenizer's core, three times as fast, if its
    tokens are the same.
    """

    def whole(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    probe = f"{_MARK}  é\n{''.join(tokenizer.all_special_tokens)} x\n"
    expected, core = (
        whole(probe),
        getattr(tokenizer, "backend_tokenizer", None),
    )  # `whole` switches off truncation and padding
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
    if answer.calls:
        fields["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": {"x": _MARK}}}
            for call in answer.calls
        ]
    return Message(fields)
