"""Extracts thoughts and tool calls from answers, in the format of the model."""

import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.environment.call_formats import HERMES, CallFormat, properties_of
from services.environment.messages import Message


class Parsed(NamedTuple):
    """An answer as a message, and why a tool call in it cannot be read; empty when all can."""

    message: Message
    problem: str


def parse_answer(
    text: str,
    tools: Sequence[dict[str, Any]],
    call_format: CallFormat = HERMES,
    id_prefix: str = "",
) -> Parsed:
    """Returns the answer as a message; looks for tool calls only with `tools`.

    If one tool call cannot be read, all of them stay in the content, so that nothing that was
    sampled is lost.
    """
    fields: dict[str, Any] = {"role": "assistant"}
    thoughts = [_text(match) for match in call_format.thought.finditer(text)]
    content = text
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts).strip()
        content = call_format.thought.sub("", text).lstrip()

    tool_calls: list[dict[str, Any]] = []
    problem = ""
    try:
        calls = read_calls(content, tools, call_format) if tools else []
    except ValueError as error:
        calls = []
        problem = str(error)
    except RecursionError:
        calls = []
        problem = "the tool call is nested too deeply"
    for number, (name, arguments) in enumerate(calls):
        identifier = f"call_{id_prefix}_{number}" if id_prefix else f"call_{uuid.uuid4().hex[:24]}"
        tool_calls.append(
            {
                "id": identifier,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )

    if tool_calls:
        fields["tool_calls"] = tool_calls
        content = call_format.block.sub("", content)
    if call_format.markup is not None:
        content = call_format.markup.sub("", content)
    if tool_calls:
        content = content.strip()
    return Parsed(Message(fields | {"content": content}), problem)


def read_calls(
    text: str, tools: Sequence[dict[str, Any]], call_format: CallFormat
) -> list[tuple[str, Any]]:
    """Returns the name and arguments of every tool call. Raises ValueError when one cannot be
    read.
    """
    properties = properties_of(tools)
    calls = []
    for block in call_format.block.finditer(text):
        calls += call_format.read(_text(block), properties)
    return calls


def _text(match: re.Match[str]) -> str:
    """Returns the first group that took part in a match."""
    return next((group for group in match.groups() if group is not None), "")
