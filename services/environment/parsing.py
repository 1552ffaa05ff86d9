"""Extracts thoughts and tool calls from answers: `<think>…</think>`, `<tool_call>{…}</tool_call>`
(Hermes, Qwen).
"""

import json
import re
import uuid
from typing import Any, NamedTuple

from services.environment.messages import Message, parsed_arguments

_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Parsed(NamedTuple):
    """An answer as a message, and why a tool call in it cannot be read; empty when all can."""

    message: Message
    problem: str


def parse_answer(text: str, tools: bool, id_prefix: str = "") -> Parsed:
    """Returns the answer as a message; looks for tool calls only with `tools`.

    If one tool call is not JSON, all of them stay in the content, so that nothing that was sampled
    is lost.
    """
    fields: dict[str, Any] = {"role": "assistant"}
    thought, content = _split(text)
    if thought is not None:
        fields["reasoning_content"] = thought.strip()
        content = content.lstrip()

    tool_calls: list[dict[str, Any]] = []
    problem = ""
    matches = _TOOL_CALL.finditer(content) if tools else ()
    for number, match in enumerate(matches):
        name, arguments, problem = _parse_tool_call(match[1])
        if problem:
            tool_calls = []
            break
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
        content = _TOOL_CALL.sub("", content).strip()
    return Parsed(Message(fields | {"content": content}), problem)


def _split(text: str) -> tuple[str | None, str]:
    """Separates the thoughts from the rest; if the thoughts never end, there is no rest."""
    match = _THOUGHT.match(text)
    if match is not None:
        return match[1], text[match.end() :]
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>"), ""
    return None, text


def _parse_tool_call(text: str) -> tuple[str, Any, str]:
    """Returns the name and arguments of a tool call, and what is wrong with it."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return "", {}, f"the tool call is not JSON: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return "", {}, "the tool call has no name"
    arguments = parsed_arguments(content.get("arguments", content.get("parameters")))
    if not isinstance(arguments, dict):
        return "", {}, "the arguments of the tool call are not a mapping"
    return content["name"], arguments, ""
