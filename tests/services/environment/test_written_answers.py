"""Answers in the three APIs, whole and as streams, against their documented forms.

A stream is put together again as client libraries do it, and must give the whole body.
"""

import json
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.schemas import FinishReason
from services.environment.dialects import DIALECTS, Call, Dialect
from services.environment.messages import Chat, Message, made_tool_call
from services.environment.session import CallAnswer, CallOptions, CallRecord

NOW = 1_700_000_000
CHAT, RESPONSES, MESSAGES = DIALECTS
_TEXT = st.sampled_from(["", "a", "b c", "é\n"])


class Said(NamedTuple):
    """What a model said."""

    text: str
    thought: str
    calls: list[dict[str, int]]
    """Their arguments."""
    finish: FinishReason
    stop_text: str
    prompt: int
    sampled: int


SAID = st.builds(
    Said,
    text=_TEXT,
    thought=_TEXT,
    calls=st.lists(st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)), max_size=2),
    finish=st.sampled_from(["stop", "length"]),
    stop_text=st.sampled_from(["", "END"]),
    prompt=st.integers(1, 99),
    sampled=st.integers(1, 99),
)


def written(said: Said, dialect: Dialect, streams_usage: bool) -> tuple[Any, list[Any]]:
    """Returns an answer as one body, and its events with their names."""
    calls = [
        made_tool_call(f"call_{number}", f"tool{number}", arguments)
        for number, arguments in enumerate(said.calls)
    ]
    fields: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thought:
        fields["reasoning_content"] = said.thought
    if calls:
        fields["tool_calls"] = calls
    answer = CallAnswer(
        call=CallRecord("a"),
        message=Message(fields),
        finish_reason=said.finish,
        prompt_tokens=said.prompt,
        sampled_tokens=said.sampled,
        problem="",
        stop_text=said.stop_text,
    )
    call = Call(
        chat=Chat(),
        tools=[],
        model="mine",
        streams=True,
        streams_usage=streams_usage,
        options=CallOptions(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: NOW + 0.5)
        body = dialect.write(answer, call, "ID")
    events = []
    for event in dialect.events(body, call):
        assert event.endswith("\n\n")
        *head, data = event.removesuffix("\n\n").split("\n")
        content = data.removeprefix("data: ")
        assert content != data
        if content != "[DONE]":
            content = json.loads(content)
        events.append((head, content))
    return body, events


@given(SAID, st.booleans())
def test_a_chat_completion(said: Said, streams_usage: bool) -> None:
    body, events = written(said, CHAT, streams_usage)
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.thought:
        message["reasoning_content"] = said.thought
    finish: str = said.finish
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": f"tool{number}", "arguments": json.dumps(arguments)},
            }
            for number, arguments in enumerate(said.calls)
        ]
        finish = "length" if finish == "length" else "tool_calls"
    usage = {
        "prompt_tokens": said.prompt,
        "completion_tokens": said.sampled,
        "total_tokens": said.prompt + said.sampled,
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    common = {"id": "chatcmpl-ID", "created": NOW, "model": "mine"}
    whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
    assert body == common | whole

    *chunks, done = [content for head, content in events if not head]
    assert len(chunks) == len(events) - 1, "no event has a name"
    assert done == "[DONE]"
    for chunk in chunks:
        assert {name: chunk[name] for name in common} == common
        assert chunk["object"] == "chat.completion.chunk"
    if streams_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], usage)
    assert [set(chunk) for chunk in chunks] == [{*common, "object", "choices"}] * 2
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["index"] for part in parts] == [0, 0]
    assert [part["finish_reason"] for part in parts] == [None, finish]
    streamed = parts[0]["delta"] | parts[1]["delta"]
    if said.calls:
        places = [call.pop("index") for call in streamed["tool_calls"]]
        assert places == list(range(len(said.calls)))
    assert streamed == message


@given(SAID)
def test_a_response(said: Said) -> None:
    body, events = written(said, RESPONSES, False)
    output: list[dict[str, Any]] = []
    if said.thought:
        thought = {"type": "reasoning_text", "text": said.thought}
        output.append({"type": "reasoning", "id": "rs_ID", "summary": [], "content": [thought]})
    if said.text or not said.calls:
        part = {"type": "output_text", "text": said.text, "annotations": []}
        message = {"type": "message", "id": "msg_ID", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [part]})
    for number, arguments in enumerate(said.calls):
        call = {"type": "function_call", "id": f"fc_ID_{number}", "call_id": f"call_{number}"}
        call |= {"name": f"tool{number}", "arguments": json.dumps(arguments)}
        output.append(call | {"status": "completed"})
    is_cut = said.finish == "length"
    assert body == {
        "id": "resp_ID",
        "object": "response",
        "created_at": NOW,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": "mine",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": said.prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": said.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.prompt + said.sampled,
        },
    }

    contents = []
    for number, (head, content) in enumerate(events):
        kind = content.pop("type")
        assert head == [f"event: {kind}"]
        assert content.pop("sequence_number") == number
        contents.append((kind, content))
    begun = body | {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    expected: list[tuple[str, Any]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for place, item in enumerate(output):
        at = {"output_index": place, "item_id": item["id"]}
        started = dict(item)
        inside: list[tuple[str, Any]] = []
        if item["type"] == "message":
            started |= {"content": [], "status": "in_progress"}
            at["content_index"] = 0
            (part,) = item["content"]
            text = {"text": said.text, "logprobs": []}
            inside = [
                ("response.content_part.added", at | {"part": part | {"text": ""}}),
                ("response.output_text.delta", at | {"delta": said.text, "logprobs": []}),
                ("response.output_text.done", at | text),
                ("response.content_part.done", at | {"part": part}),
            ]
        elif item["type"] == "function_call":
            started |= {"arguments": "", "status": "in_progress"}
            name = "response.function_call_arguments"
            whole = {"arguments": item["arguments"], "name": item["name"]}
            inside = [
                (f"{name}.delta", at | {"delta": item["arguments"]}),
                (f"{name}.done", at | whole),
            ]
        expected.append(("response.output_item.added", {"output_index": place, "item": started}))
        expected += inside
        expected.append(("response.output_item.done", {"output_index": place, "item": item}))
    ending = "response.incomplete" if is_cut else "response.completed"
    assert contents == [*expected, (ending, {"response": body})]


@given(SAID)
def test_a_message_of_anthropics(said: Said) -> None:
    body, events = written(said, MESSAGES, False)
    content: list[dict[str, Any]] = []
    if said.thought:
        content.append({"type": "thinking", "thinking": said.thought, "signature": "ID"})
    if said.text or not said.calls:
        content.append({"type": "text", "text": said.text})
    for number, arguments in enumerate(said.calls):
        name = {"id": f"call_{number}", "name": f"tool{number}"}
        content.append({"type": "tool_use", "input": arguments} | name)
    reason = "stop_sequence" if said.stop_text else "end_turn"
    if said.calls:
        reason = "tool_use"
    if said.finish == "length":
        reason = "max_tokens"
    ending = {"stop_reason": reason, "stop_sequence": said.stop_text or None}
    usage = {"input_tokens": said.prompt, "output_tokens": said.sampled}
    whole = {"id": "msg_ID", "type": "message", "role": "assistant", "model": "mine"}
    assert body == whole | ending | {"content": content, "usage": usage}

    streamed: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for head, event in events:
        assert head == [f"event: {event['type']}"]
        match event:
            case {"type": "message_start", "message": message}:
                assert not streamed
                assert message["content"] == []
                assert message["stop_reason"] is message["stop_sequence"] is None
                streamed = message
            case {"type": "content_block_start", "index": place, "content_block": block}:
                assert place == len(streamed["content"])
                assert not any(block.get(name) for name in ("text", "thinking", "signature"))
                assert not block.get("input")
                streamed["content"].append(block)
            case {"type": "content_block_delta", "index": place, "delta": delta}:
                assert place == len(streamed["content"]) - 1
                kind = delta.pop("type").removesuffix("_delta")
                ((name, text),) = delta.items()
                assert kind == {"partial_json": "input_json"}.get(name, name)
                if name == "partial_json":
                    texts[place] = texts.get(place, "") + text
                else:
                    streamed["content"][place][name] += text
            case {"type": "content_block_stop", "index": place}:
                assert place == len(streamed["content"]) - 1
                if place in texts:
                    streamed["content"][place]["input"] = json.loads(texts[place])
            case {"type": "message_delta", "delta": delta, "usage": counted}:
                streamed |= delta | {"usage": counted}
            case _:
                assert event == {"type": "message_stop"}
                assert event == events[-1][1]
    assert streamed == body
    starts = [event["type"] for _, event in events]
    count = len(content)
    assert starts.count("content_block_start") == starts.count("content_block_stop") == count
    assert (starts[0], starts[-2:]) == ("message_start", ["message_delta", "message_stop"])
