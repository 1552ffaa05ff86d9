"""A conversation that a program sends again with every call, and goes on; the tools that it offers."""

import random
from typing import Any

import pytest

from common import Json
from common.errors import InvalidInput
from services.environment.dialects import DIALECTS
from services.environment.messages import Chat, parse_chat, parse_messages


def test_a_chat_that_goes_on_has_the_messages_of_a_new_one() -> None:
    """Whatever the program changed: a part of what it sent before, or only a type in a tool call."""
    for seed in range(500):
        draw = random.Random(seed)
        chat = [_drawn(draw) for _ in range(draw.randint(1, 5))]
        before = parse_chat(chat, "messages", Chat())
        if draw.random() < 0.4:
            chat[draw.randrange(len(chat))] = _drawn(draw)
        chat = chat[: draw.randint(1, len(chat))] + [
            _drawn(draw) for _ in range(draw.randint(0, 2))
        ]
        after = parse_chat(chat, "messages", before)
        expected = [message.fields for message in parse_messages(chat)]
        assert repr([message.fields for message in after.messages]) == repr(expected)


def _drawn(draw: random.Random) -> Json:
    arguments = {"x": draw.choice([1, True, 1.0, "1"])}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return draw.choice(
        [
            {"role": "user", "content": draw.choice("ab")},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    )


def test_the_first_wrong_field_after_a_known_beginning_is_named_by_its_place() -> None:
    good = {"role": "user", "content": "a"}
    before = parse_chat([good, good], "messages", Chat())
    for wrong, field in (({"role": "x"}, "messages[3].role"), (7, "messages[3]")):
        with pytest.raises(InvalidInput) as caught:
            parse_chat([good, good, good, wrong], "messages", before)
        assert caught.value.field == field
        assert caught.value.value == str(wrong)


@pytest.mark.parametrize("description", [None, "", "Adds."])
@pytest.mark.parametrize("schema", [None, {}, {"type": "object", "properties": {"a": {}}}])
@pytest.mark.parametrize("says_kind", [True, False])
def test_a_tool_is_the_same_in_every_dialect(
    description: str | None, schema: Any, says_kind: bool
) -> None:
    named = {"name": "add", "description": description}
    tools = {
        "responses": {**named, "type": "function", "parameters": schema},
        "messages": {**named, "input_schema": schema, **({"type": "custom"} if says_kind else {})},
    }
    function = {
        "name": "add",
        "description": description or "",
        "parameters": schema or {"type": "object", "properties": {}},
    }
    by_path = {dialect.path: dialect for dialect in DIALECTS}
    for path, tool in tools.items():
        found = by_path[path].read_tool(tool)
        assert found == {"type": "function", "function": function}
        # The provider's own tools are refused later, as what they are.
        own = {**tool, "type": "web_search"}
        assert by_path[path].read_tool(own) == own
    assert by_path["chat/completions"].read_tool(found) == found
