"""Messages in OpenAI's chat format, as passed to the chat template and compared by the gateway."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from common.errors import InvalidInput

Json = dict[str, Any]
"""A JSON object."""
Tools = Sequence[Json]
"""The functions that a call offers to the model, in OpenAI's format."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_CALL_FORM = '{"id": text, "type": "function", "function": {"name": text, "arguments": JSON}}'
_TOOL_FORM = '{"type": "function", "function": {"name": text, "parameters": JSON schema}}'
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Message:
    """One message. `fields` is passed to the chat template; in it, arguments of tool calls are
    mappings.
    """

    fields: Json

    @property
    def role(self) -> str:
        return str(self.fields["role"])

    @property
    def content(self) -> str:
        return str(self.fields["content"])

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
        # The texts first: calls are costly to compare.
        if self.role != sent.role or self._parts[1] != sent._parts[1]:
            return False
        has_tool_calls = "tool_calls" in self.fields or "tool_calls" in sent.fields
        return not has_tool_calls or self._calls == sent._calls

    def has_thoughts_of(self, sent: "Message") -> bool:
        """Whether the thoughts agree; this tells two equal answers apart."""
        return self._parts[0] == sent._parts[0]

    @cached_property
    def _calls(self) -> str:
        """The tool calls as text, without their ids, since programs make their own.

        Numbers that JavaScript does not tell apart are written alike: 1.0 comes back from it as 1,
        and an integer from 2^53 on as the nearest float.
        """
        written = json.dumps([call["function"] for call in self.tool_calls])
        # `float` of a number's text: an integer may be beyond all floats, and becomes infinity.
        calls = json.loads(written, parse_int=_number, parse_float=_number)
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


def parse_messages(content: Any, where: str = "messages") -> list[Message]:
    """Returns the messages of a request. Raises InvalidInput that names the first wrong field."""
    if not isinstance(content, list) or not content:
        raise InvalidInput(
            "a conversation must be a list of messages",
            field=where,
            value=content,
            remedy="send at least one message",
        )
    return [_parse_message(each, f"{where}[{i}]") for i, each in enumerate(content)]


def check_mapping(message: Any, where: str) -> None:
    """Raises InvalidInput for a message that is no mapping."""
    if not isinstance(message, dict):
        raise InvalidInput(
            "a message must be a mapping with role and content",
            field=where,
            value=message,
            remedy='send {"role": "user", "content": text}',
        )


def _parse_message(content: Any, where: str) -> Message:
    check_mapping(content, where)
    role = content.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidInput(
            "there is no such role",
            field=f"{where}.role",
            value=role,
            remedy=f"use one of {', '.join(ROLES)}",
        )

    fields: Json = {
        "role": ROLES[role],
        "content": text_of(content.get("content"), f"{where}.content"),
    }
    if fields["role"] == "assistant":
        calls = content.get("tool_calls") or []
        if not isinstance(calls, list):
            raise InvalidInput(
                "tool calls must be a list",
                field=f"{where}.tool_calls",
                value=calls,
                remedy=f"send [CALL, …], for each call {_CALL_FORM}",
            )
        if calls:
            fields["tool_calls"] = [
                _parse_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        for name in _REASONING:
            if isinstance(content.get(name), str) and content[name]:
                fields["reasoning_content"] = content[name]
                break

    for name in ("name", "tool_call_id"):
        value = content.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidInput(
                f"{name} must be text",
                field=f"{where}.{name}",
                value=value,
                remedy=f'send {{"{name}": text}}, or leave it out',
            )
        if value:
            fields[name] = value
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
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _parse_tool_call(content: Any, where: str) -> Json:
    if not _is_function(content):
        raise InvalidInput(
            "this is not a tool call", field=where, value=content, remedy=f"send {_CALL_FORM}"
        )
    function = content["function"]
    arguments = _parsed_arguments(function.get("arguments"))
    return made_tool_call(str(content.get("id") or ""), function["name"], arguments)


def _is_function(content: Any) -> bool:
    """Returns whether this is a tool, or a call of one, with its name."""
    function = content.get("function") if isinstance(content, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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
        if not _is_function(tool):
            raise InvalidInput(
                "a tool must be a function",
                field=f"tools[{i}]",
                value=tool,
                remedy=f"send {_TOOL_FORM}",
            )
    return tools


def tools_key(tools: Tools) -> str:
    """Returns a text that is equal for equal tools, whatever the order of their keys."""
    return json.dumps(list(tools), sort_keys=True)
