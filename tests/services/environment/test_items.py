"""A conversation that comes as items, as OpenAI's Responses has it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.environment.dialects import DIALECTS, read_call

_OF_FIELD = {dialect.path: dialect for dialect in DIALECTS}
_WORDS = st.sampled_from(["a", "bc", "d e"])
_ANSWERS = st.tuples(st.sampled_from(["", "hm"]), _WORDS, st.lists(st.integers(0, 9), max_size=2))
"""The thought, the text and the arguments of the calls of an answer."""
_TURNS = st.lists(st.one_of(_WORDS, _ANSWERS), min_size=1, max_size=6)


def _call(turn: int, number: int) -> str:
    return f"call_{turn}_{number}"


def _items(turns: list[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for turn, each in enumerate(turns):
        if isinstance(each, str):
            found.append({"role": "user", "content": each})
            continue
        thought, text, calls = each
        if thought:
            summary = [{"type": "summary_text", "text": thought}]
            found.append({"type": "reasoning", "summary": summary})
        content = [{"type": "output_text", "text": text}]
        found.append({"type": "message", "role": "assistant", "content": content})
        for number, argument in enumerate(calls):
            known = {"call_id": _call(turn, number), "name": "f"}
            arguments = json.dumps({"x": argument})
            found.append({"type": "function_call", **known, "arguments": arguments})
        for number, argument in enumerate(calls):
            output = {"call_id": _call(turn, number), "output": f"got {argument}"}
            found.append({"type": "function_call_output", **output})
    return found


@given(_TURNS)
def test_every_answer_keeps_its_text_its_thought_and_its_calls(turns: list[Any]) -> None:
    read = read_call({"model": "m", "input": _items(turns)}, _OF_FIELD["responses"]).messages
    expected: list[tuple[str, str, list[str]]] = []
    thoughts = []
    for turn, each in enumerate(turns):
        if isinstance(each, str):
            expected.append(("user", each, []))
            continue
        thought, text, calls = each
        thoughts.append(thought)
        identifiers = [_call(turn, number) for number in range(len(calls))]
        expected.append(("assistant", text, identifiers))
        expected += [("tool", f"got {argument}", []) for argument in calls]
    assert [
        (message.role, message.content, [call["id"] for call in message.tool_calls])
        for message in read
    ] == expected
    found = [message.reasoning for message in read if message.role == "assistant"]
    assert found == thoughts
