"""Extracts thoughts and tool calls from answers, in the format of the model."""

from typing import NamedTuple

from services.environment.call_formats import HERMES, Call, CallFormat, schemas_of
from services.environment.messages import Json, Message, Tools, made_tool_call


class Parsed(NamedTuple):
    """An answer as a message, and why a tool call in it cannot be read; empty when all can."""

    message: Message
    problem: str


def parse_answer(
    text: str,
    tools: Tools,
    call_format: CallFormat = HERMES,
    answer: int = 0,
) -> Parsed:
    """Returns an answer as a message; looks for tool calls only with `tools`. The ids of its calls
    begin with its number, `answer`.

    If one tool call cannot be read, all of them stay in the content, so that nothing that was
    sampled is lost.
    """
    schemas = schemas_of(tools)
    thoughts, parts = _split(text, call_format)
    calls: list[Call] = []
    spoken: list[str] = []
    problem = ""
    try:
        for part, block in parts:
            found = call_format.read(block, schemas) if tools and block is not None else []
            calls += found
            if not found:
                spoken.append(part)
    except ValueError as error:
        problem = str(error)
    except RecursionError:
        problem = "the tool call is nested too deeply"

    if problem and not thoughts and "</think>" in text:
        # The thought may mention only the beginning of a call, whose open string then hides the
        # thought's end.
        after_thought = parse_answer(f"<think>{text}", tools, call_format, answer)
        if after_thought.message.tool_calls:
            return after_thought

    fields: Json = {"role": "assistant"}
    content = "".join(part for part, _ in parts)
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts).strip()
        content = content.lstrip()
    if calls and not problem:
        fields["tool_calls"] = []
        for number, (name, arguments) in enumerate(calls):
            fields["tool_calls"].append(made_tool_call(f"call_{answer}_{number}", name, arguments))
        content = "".join(spoken).strip()
    return Parsed(Message(fields | {"content": content}), problem)


def _split(text: str, call_format: CallFormat) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Returns the thoughts of an answer, and its other parts in order: each as it was written, and
    for a block of calls what its reader needs.
    """
    thoughts: list[str] = []
    parts: list[tuple[str, str | None]] = []
    position = 0
    for piece in call_format.pieces.finditer(text):
        parts.append((text[position : piece.start()], None))
        position = piece.end()
        kind = piece.lastgroup
        if kind == "call":
            parts.append((piece[0], piece["call"]))
        elif kind == "end" and thoughts:
            parts.append((piece[0], None))
        elif kind == "end":
            # Everything before was thought, also what looked like calls.
            thoughts.append(text[: piece.start()])
            parts.clear()
        elif kind is not None:
            thoughts.append(piece[kind])
    parts.append((text[position:], None))
    return thoughts, parts
