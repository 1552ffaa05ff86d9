"""Messages in OpenAI's chat format, as passed to the chat template and compared by the gateway."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from common import Json
from common.errors import InvalidInput

Tools = Sequence[Json]
"""The functions that a call offers to the model, in OpenAI's format."""
_CALL_FORM = '{"id": text, "type": "function", "function": {"name": text, "arguments": JSON}}'
_TOOL_FORM = '{"type": "function", "function": {"name": text, "parameters": JSON schema}}'


@dataclass
class Message:
    """One message. `fields` is passed to the chat template; in it, arguments of tool calls are
    mappings.
    """

    fields: Json

    def __post_init__(self) -> None:
        self.role = str(self.fields["role"])
        self.content = str(self.fields["content"])

    @property
    def tool_calls(self) -> list[Json]:
        """The tool calls, each with `id`, `type` and `function`."""
        calls: list[Json] = self.fields.get("tool_calls", [])
        return calls

    @property
    def reasoning(self) -> str:
        return str(self.fields.get("reasoning_content", ""))

    @property
    def chars(self) -> int:
        """Number of characters in the whole message."""
        return sum(len(str(value)) for value in self.fields.values())

    @cached_property
    def _parts(self) -> tuple[str, str]:
        """The thoughts and the rest of the content, without what programs change on the way: line
        ends, and the white space around a text.
        """
        thoughts = self.reasoning
        content = self.content
        if self.role == "assistant" and "</think>" in content:
            # Some programs send thoughts back inside the content.
            thoughts, _, content = content.rpartition("</think>")
            thoughts = thoughts.strip().removeprefix("<think>")
        return _plain(thoughts), _plain(content)

    def is_sent(self, sent: "Message") -> bool:
        """Whether `sent` is this recorded message: the same text and calls, whatever its name and
        thoughts.
        """
        if sent is self:
            return True
        # The texts first: calls are costly to compare.
        if self.role != sent.role or self._parts[1] != sent._parts[1]:
            return False
        has_tool_calls = "tool_calls" in self.fields or "tool_calls" in sent.fields
        return not has_tool_calls or self._written == sent._written or self._calls == sent._calls

    def has_thoughts_of(self, sent: "Message") -> bool:
        """Whether the thoughts agree; this tells two equal answers apart."""
        return self._parts[0] == sent._parts[0]

    @cached_property
    def _written(self) -> str:
        """The tool calls as JSON, without their ids, since programs make their own."""
        return json.dumps([call["function"] for call in self.tool_calls])

    @cached_property
    def _calls(self) -> str:
        """The tool calls as text in which the same ones are equal, however a program wrote them.

        Numbers that JavaScript does not tell apart are written alike: 1.0 comes back from it as 1,
        and an integer from 2^53 on as the nearest float.
        """
        # `float` of a number's text: an integer may be beyond all floats, and becomes infinity.
        calls = json.loads(self._written, parse_int=_number, parse_float=_number)
        return json.dumps(calls, sort_keys=True)


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _number(digits: str) -> float:
    """Returns a number as JavaScript has it: a float, written as an integer where it is one."""
    value = float(digits)
    # A float holds every integer below 2^53 exactly.
    return int(value) if abs(value) < 2**53 and value.is_integer() else value


def user_message(text: str) -> Message:
    """Returns a message of the user."""
    return Message({"role": "user", "content": encodable(text)})


def tool_message(text: str, tool_call: Json) -> Message:
    """Returns the result of a tool call."""
    return Message(
        {
            "role": "tool",
            "content": encodable(text),
            "tool_call_id": tool_call["id"],
            "name": tool_call["function"]["name"],
        }
    )


def made_tool_call(identifier: Any, name: Any, arguments: Any) -> Json:
    """Returns a tool call in OpenAI's format."""
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def made_tool(name: Any, description: Any, parameters: Any) -> Json:
    """Returns a tool in OpenAI's format; without arguments if `parameters` is empty."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Sent(msgspec.Struct):
    """A message of chat completions."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    """Another name of the same."""
    name: str | None = None
    tool_call_id: str | None = None


class Chat(NamedTuple):
    """A conversation as a program sent it."""

    text: bytes = b"[]"
    """Its messages as JSON."""
    messages: Sequence[Message] = ()


def parse_chat(content: Any, where: str, before: Chat) -> Chat:
    """Does the same as `parse_messages`, but takes the messages from an earlier chat if that is the
    beginning of this one: a program sends its whole conversation with every call.
    """
    text = written(content)
    known = before.messages if text.startswith(before.text[:-1]) else ()
    return Chat(text, [*known, *parse_messages(content, where, start=len(known))])


def written(content: Any, option: int = 0) -> bytes:
    """Returns part of a request as JSON. Raises InvalidInput."""
    try:
        return orjson.dumps(content, option=option)
    except TypeError:  # orjson can parse deeper nesting than it can write
        raise InvalidInput(
            "the body is nested too deeply", field="body", remedy="nest it at most 250 levels deep"
        ) from None


def parse_messages(content: Any, where: str = "messages", start: int = 0) -> list[Message]:
    """Returns the messages of a request from `start` on. Raises InvalidInput that names the first
    wrong field.
    """
    if not isinstance(content, list) or not content:
        raise InvalidInput(
            "a conversation must be a list of messages",
            field=where,
            value=content,
            remedy="send at least one message",
        )
    try:
        # All at once: this takes a third of the time of one after the other.
        sent = msgspec.convert(content[start:], list[_Sent])
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$[")
        wrong, _, part = path.rstrip("`").partition("]")
        number = start + int(wrong)
        raise InvalidInput(
            f"a message is not as in OpenAI's chat completions: {reason}",
            field=f"{where}[{number}]{part}",
            value=content[number],
            remedy=f"send {{role, content}}; each of the assistant's tool_calls is {_CALL_FORM}",
        ) from None
    return [_message(each, i, where) for i, each in enumerate(sent, start)]


def _message(sent: _Sent, number: int, where: str) -> Message:
    content = text_of(sent.content, f"{where}[{number}].content")
    fields: Json = {"role": "system" if sent.role == "developer" else sent.role, "content": content}
    # Chat templates ask which of these a message has.
    if sent.name:
        fields["name"] = sent.name
    if sent.tool_call_id:
        fields["tool_call_id"] = sent.tool_call_id
    if sent.role == "assistant":
        thoughts = sent.reasoning_content or sent.reasoning
        if thoughts and isinstance(thoughts, str):
            fields["reasoning_content"] = thoughts
        if sent.tool_calls:
            fields["tool_calls"] = [
                made_tool_call(
                    call.id or "", call.function.name, _parsed_arguments(call.function.arguments)
                )
                for call in sent.tool_calls
            ]
    return Message(fields)


def text_of(content: Any, where: str) -> str:
    """Returns the text of a message's content: a text or a list of text parts.

    Raises InvalidInput for anything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, list):
        raise InvalidInput(
            "content must be text or a list of texts",
            field=where,
            value=content,
            remedy='send text or [{"type": "text", "text": text}]',
        )
    texts = []
    for i, part in enumerate(content):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise InvalidInput(
                "this model accepts only text",
                field=f"{where}[{i}]",
                value=part,
                remedy="leave out images, audio and files",
            )
        texts.append(text)
    return encodable("".join(texts))


def encodable(text: str) -> str:
    """Returns a text with `?` for lone surrogates, which neither tokens nor UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def _parsed_arguments(arguments: Any) -> Any:
    """Parses the arguments of a tool call; returns them unchanged when they are not JSON."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        # Not Python's parser, which accepts NaN and Infinity.
        return orjson.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def parse_tools(content: Any, read: Callable[[Json], Any]) -> list[Json]:
    """Returns the functions that a request offers, in OpenAI's format, to which `read` converts
    each. Raises InvalidInput for anything else.
    """
    if content is None:
        return []
    if not isinstance(content, list):
        raise InvalidInput(
            "tools must be a list of functions",
            field="tools",
            value=content,
            remedy=f"send [TOOL, …], for each tool {_TOOL_FORM}",
        )
    tools = [read(tool) if isinstance(tool, dict) else tool for tool in content]
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidInput(
                "a tool must be a function",
                field=f"tools[{i}]",
                value=tool,
                remedy=f"send {_TOOL_FORM}",
            )
    return tools


def tools_key(tools: Tools) -> str:
    """Returns a text that is equal for equal tools, whatever the order of their keys."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""
