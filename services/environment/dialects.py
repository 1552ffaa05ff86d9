"""The three model APIs for programs: OpenAI's chat completions and responses, and Anthropic's
messages.

Each reads a request as messages and tools, and writes a complete answer as one body or as events.
`call_fields` says what their other fields do.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from common import Json
from common.errors import InvalidInput
from services.environment.call_fields import check_fields, leaves_tools_out, read_options
from services.environment.messages import (
    Chat,
    Message,
    made_tool,
    made_tool_call,
    parse_chat,
    parse_tools,
    text_of,
)
from services.environment.session import CallAnswer, CallOptions

_NO_CHAT = Chat()


class Call(NamedTuple):
    """A request in any dialect."""

    chat: Chat
    tools: list[Json]
    model: str
    streams: bool
    streams_usage: bool
    """Whether a stream of chat completions ends with the usage."""
    options: CallOptions

    @property
    def messages(self) -> Sequence[Message]:
        return self.chat.messages


class Dialect(NamedTuple):
    """One API."""

    path: str
    field: str
    """The field with the conversation."""
    body: Json
    """JSON schema of the conversation."""
    read: Callable[[Json], Any]
    """Returns the conversation of a request as messages of chat completions."""
    read_tool: Callable[[Json], Any]
    """Converts a tool to the format of chat completions; anything but a function of the program is
    returned unchanged, and refused later."""
    write: Callable[[CallAnswer, Call, str], Json]
    events: Callable[[Json, Call], Iterator[str]]


def read_call(body: Any, dialect: Dialect, before: Chat = _NO_CHAT) -> Call:
    """Reads a request whose conversation may go on from that of an earlier one. Raises InvalidInput
    that names the field.
    """
    if not isinstance(body, dict):
        raise InvalidInput(
            "the body must be a JSON object",
            field="body",
            value=body,
            remedy=f'send {{"{dialect.field}": …}}',
        )
    check_fields(body, dialect.path)
    chat = parse_chat(dialect.read(body), dialect.field, before)
    tools = parse_tools(body.get("tools"), dialect.read_tool)
    options = body.get("stream_options")
    return Call(
        chat=chat,
        tools=[] if leaves_tools_out(body) else tools,
        model=str(body.get("model") or "policy"),
        streams=bool(body.get("stream")),
        streams_usage=isinstance(options, dict) and options.get("include_usage") is True,
        options=read_options(body),
    )


def _event(content: Json, named: bool = True) -> str:
    """Returns a server-sent event; `named` by its type."""
    head = f"event: {content['type']}\n" if named else ""
    return f"{head}data: {json.dumps(content)}\n\n"


def _arguments(tool_call: Json) -> str:
    """Returns the arguments of a tool call as JSON, the form of OpenAI's APIs."""
    return json.dumps(tool_call["function"]["arguments"])


# OpenAI's chat completions


def _write_chat(answer: CallAnswer, call: Call, identifier: str) -> Json:
    message = answer.message
    written: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    finish_reason: str = answer.finish_reason
    if message.tool_calls:
        written["content"] = message.content or None
        written["tool_calls"] = [
            made_tool_call(each["id"], each["function"]["name"], _arguments(each))
            for each in message.tool_calls
        ]
        if finish_reason == "stop":
            finish_reason = "tool_calls"

    choice = {"index": 0, "message": written, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": f"chatcmpl-{identifier}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.sampled_tokens,
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def _chat_events(body: Json, call: Call) -> Iterator[str]:
    choice = body["choices"][0]
    common: Json = {
        "id": body["id"],
        "created": body["created"],
        "model": body["model"],
        "object": "chat.completion.chunk",
    }

    def chunk(delta: Json, finish_reason: str | None) -> str:
        part = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _event(common | {"choices": [part]}, named=False)

    message = choice["message"]
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"])
        message = message | {"tool_calls": [{"index": i} | call for i, call in calls]}
    yield chunk(message, None)
    yield chunk({}, choice["finish_reason"])
    # Only on request: this chunk has no choices, and many programs read choices[0].
    if call.streams_usage:
        yield _event(common | {"choices": [], "usage": body["usage"]}, named=False)
    yield "data: [DONE]\n\n"


# OpenAI's responses


def _read_responses(body: Json) -> list[Json]:
    chat: list[Json] = []
    if body.get("instructions"):
        chat.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    content = body.get("input")
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list):
        raise InvalidInput(
            "the input must be text or a list of items",
            field="input",
            value=content,
            remedy='send text or [{"role": "user", "content": text}]',
        )
    for i, item in enumerate(content):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            text = text_of(item.get("content"), f"{where}.content")
            part: Json = {"role": item.get("role"), "content": text}
        else:
            role = "user" if kind == "function_call_output" else "assistant"
            part = _part(role, item, where)
        # The thought, the text and the tool calls of one answer are items in this order.
        has_text = bool(chat) and bool(chat[-1]["content"])
        continues = part["role"] == "assistant" and (kind == "function_call" or not has_text)
        _add(chat, part, start=0 if continues else len(chat))
    return chat


def _part(role: str, item: Any, where: str) -> Json:
    """Converts a block of Anthropic's, or an item of Responses, to a message in OpenAI's format
    that has only this part. The two name the same things differently. Raises InvalidInput.
    """
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "text":
        return {"role": role, "content": text_of([item], where)}
    if role == "assistant" and kind in ("thinking", "reasoning"):
        thought = item.get("thinking") or item.get("content") or item.get("summary")
        thought = text_of(thought, f"{where}.content")
        return {"role": role, "content": "", "reasoning_content": thought}
    if role == "assistant" and kind in ("tool_use", "function_call"):
        identifier = item.get("call_id", item.get("id"))
        arguments = item.get("arguments", item.get("input"))
        tool_call = made_tool_call(identifier, item.get("name"), arguments)
        return {"role": role, "content": "", "tool_calls": [tool_call]}
    if role == "user" and kind in ("tool_result", "function_call_output"):
        text = text_of(item.get("output", item.get("content")), f"{where}.output")
        identifier = item.get("call_id", item.get("tool_use_id"))
        return {"role": "tool", "content": text, "tool_call_id": identifier}
    raise InvalidInput(
        f"a message of the {role} has no such part",
        field=f"{where}.type",
        value=kind,
        remedy="use one of text, thinking, tool_use, tool_result (Messages), or message, "
        "reasoning, function_call, function_call_output (Responses)",
    )


def _add(chat: list[Json], part: Json, start: int) -> None:
    """Adds a part to the last message if that has the same role and is one from `start` on;
    otherwise as a new message, as each result of a tool is.
    """
    role = part["role"]
    if len(chat) <= start or chat[-1]["role"] != role or role == "tool":
        chat.append(part)
        return
    last = chat[-1]
    part["content"] = last["content"] + part["content"]
    part["tool_calls"] = last.get("tool_calls", []) + part.get("tool_calls", [])
    last.update(part)


def _flat_tool(kind: str, tool: Json) -> Json:
    """Converts a tool of this kind whose fields are not in `function`. The provider's own tools are
    returned unchanged, and refused later.
    """
    if tool.get("type", "custom") != kind:
        return tool
    parameters = tool.get("parameters", tool.get("input_schema"))
    return made_tool(tool.get("name"), tool.get("description"), parameters)


def _write_responses(answer: CallAnswer, call: Call, identifier: str) -> Json:
    message = answer.message
    output: list[Json] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        output.append(
            {"type": "reasoning", "id": f"rs_{identifier}", "summary": [], "content": [thought]}
        )
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{identifier}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for i, tool_call in enumerate(message.tool_calls):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{identifier}_{i}",
                "call_id": tool_call["id"],
                "name": tool_call["function"]["name"],
                "arguments": _arguments(tool_call),
                "status": "completed",
            }
        )

    cut = answer.finish_reason != "stop"
    return {
        "id": f"resp_{identifier}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


_BEGUN: dict[str, Json] = {
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
}
"""By type, what an item has in place of its content when a stream announces it."""


def _responses_events(body: Json, _: Call) -> Iterator[str]:
    numbers = itertools.count()

    def event(kind: str, **content: Any) -> str:
        return _event({"type": kind, "sequence_number": next(numbers)} | content)

    unfinished = body | {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield event("response.created", response=unfinished)
    yield event("response.in_progress", response=unfinished)
    for i, item in enumerate(body["output"]):
        at: Json = {"output_index": i, "item_id": item["id"]}
        begun = item | _BEGUN.get(item["type"], {})
        yield event("response.output_item.added", output_index=i, item=begun)

        if item["type"] == "message":
            part = item["content"][0]
            at["content_index"] = 0
            yield event("response.content_part.added", **at, part=part | {"text": ""})
            yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done",
                **at,
                arguments=item["arguments"],
                name=item["name"],
            )
        yield event("response.output_item.done", output_index=i, item=item)

    last = "response.incomplete" if body["incomplete_details"] else "response.completed"
    yield event(last, response=body)


# Anthropic's messages


def _read_messages(body: Json) -> Any:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return messages  # refused as no list of messages
    chat: list[Json] = []
    if body.get("system"):
        chat.append({"role": "system", "content": text_of(body["system"], "system")})
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidInput(
                "a message must be an object with role and content",
                field=where,
                value=message,
                remedy='send {"role": "user", "content": text}',
            )
        role = str(message.get("role"))
        content = message.get("content")
        if not isinstance(content, list):
            chat.append({"role": role, "content": text_of(content, f"{where}.content")})
            continue
        start = len(chat)
        for number, block in enumerate(content):
            _add(chat, _part(role, block, f"{where}.content[{number}]"), start)
    return chat


def _write_messages(answer: CallAnswer, call: Call, identifier: str) -> Json:
    message = answer.message
    content: list[Json] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": identifier})
    if message.content or not message.tool_calls:
        content.append({"type": "text", "text": message.content})
    for tool_call in message.tool_calls:
        function = tool_call["function"]
        content.append(
            {
                "type": "tool_use",
                "id": tool_call["id"],
                "name": function["name"],
                "input": function["arguments"],
            }
        )

    if answer.finish_reason != "stop":
        stop_reason = "max_tokens"
    elif message.tool_calls:
        stop_reason = "tool_use"
    elif answer.stop_text:
        stop_reason = "stop_sequence"
    else:
        stop_reason = "end_turn"
    return {
        "id": f"msg_{identifier}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": answer.stop_text or None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
    }


def _messages_events(body: Json, _: Call) -> Iterator[str]:
    unfinished: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _event({"type": "message_start", "message": body | unfinished})
    for i, block in enumerate(body["content"]):
        if block["type"] == "tool_use":
            empty_block: Json = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            name = block["type"]
            empty_block = dict.fromkeys(block, "") | {"type": name}
            delta = {"type": f"{name}_delta", name: block[name]}
        yield _event({"type": "content_block_start", "index": i, "content_block": empty_block})
        yield _event({"type": "content_block_delta", "index": i, "delta": delta})
        if "signature" in block:
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield _event({"type": "content_block_delta", "index": i, "delta": signature})
        yield _event({"type": "content_block_stop", "index": i})
    ending = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield _event({"type": "message_delta", "delta": ending, "usage": body["usage"]})
    yield _event({"type": "message_stop"})


def _body(field: str, roles: Iterable[str]) -> Json:
    """Returns the schema of a request with the conversation `field`. What else it may have is in
    the documentation of its API.
    """
    message: Json = {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": {"type": "string"}},
        "required": ["role", "content"],
    }
    conversation = {"type": "array", "items": message, "minItems": 1}
    return {"type": "object", "properties": {field: conversation}, "required": [field]}


_ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES = Dialect(
    path="messages",
    field="messages",
    body=_body("messages", ("user", "assistant")),
    read=_read_messages,
    read_tool=partial(_flat_tool, "custom"),
    write=_write_messages,
    events=_messages_events,
)
DIALECTS = (
    Dialect(
        path="chat/completions",
        field="messages",
        body=_body("messages", _ROLES),
        read=lambda body: body.get("messages"),
        read_tool=lambda tool: tool,
        write=_write_chat,
        events=_chat_events,
    ),
    Dialect(
        path="responses",
        field="input",
        body=_body("input", _ROLES),
        read=_read_responses,
        read_tool=partial(_flat_tool, "function"),
        write=_write_responses,
        events=_responses_events,
    ),
    MESSAGES,
)
