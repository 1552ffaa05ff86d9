"""Examples from every kind of source are kept whole; unusable rows are refused with file, row
and column."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from common.errors import ConfigError
from common.settings.config import from_mapping
from common.wire.schemas import Prompt
from services.data.sft_examples import Example, example_loader, load_examples


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def examples(source: str, split: str = "all", **data: Any) -> list[Prompt]:
    settings = {"data.source": source} | {f"data.{name}": value for name, value in data.items()}
    return example_loader(from_mapping(settings).data).load(split)


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.chat]


def test_the_whole_answer_of_a_column_is_kept(tmp_path: Path) -> None:
    source = written(
        tmp_path / "a.jsonl", [{"q": "1+2?", "worked": " 1+2=3\n#### 3"}, {"q": "2?", "worked": 2}]
    )
    found = examples(source, prompt_field="q", answer_field="worked")
    assert [said(prompt) for prompt in found] == [
        [("user", "1+2?"), ("assistant", " 1+2=3\n#### 3")],
        [("user", "2?"), ("assistant", "2")],
    ]


def test_prompt_and_answer_may_be_lists_of_messages(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    row = {"prompt": [system, user], "completion": [{"role": "assistant", "content": "A"}]}
    (found,) = examples(
        written(tmp_path / "a.jsonl", [row]), prompt_field="prompt", answer_field="completion"
    )
    assert said(found) == [("system", "S"), ("user", "U"), ("assistant", "A")]


def test_a_chat_may_have_many_turns(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    chat = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    as_text = {"messages": json.dumps(chat)}
    first, second = examples(
        written(tmp_path / "a.jsonl", [{"messages": chat}, as_text]), messages_field="messages"
    )
    assert said(first) == said(second) == [(role, f"{role} {n}") for n, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages_field": "messages"},
            "line 1: .* roles user; it must",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            {"messages_field": "messages"},
            "has the roles assistant; it must end",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            {"messages_field": "messages"},
            "has the roles tool",
        ),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            {"messages_field": "messages"},
            "line 1: .*has the role 'human'.*rename it to 'user'",
        ),
        (
            {"messages": [{"from": "human", "value": "a"}]},
            {"messages_field": "messages"},
            "not an object with role and content.*rename its fields",
        ),
        ({"messages": []}, {"messages_field": "messages"}, "is not a list of messages"),
        ({"question": "a"}, {}, "there is no column 'answer'"),
        ({"question": "a", "answer": " "}, {}, "column 'answer' is empty"),
        (
            {"messages": []},
            {},
            "there is no column 'question'.*set data.prompt_field or data.messages_field",
        ),
    ],
)
def test_a_row_without_an_answer_is_refused(
    tmp_path: Path, row: dict[str, Any], data: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        examples(written(tmp_path / "a.jsonl", [row]), **data)


def test_the_known_data_sets_give_their_solutions(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": "so \\boxed{2}", "level": "Level 5", "type": "Algebra"}
    easy = row | {"level": "Level 1", "problem": "q"}
    source = written(tmp_path / "math.jsonl", [row, easy])
    assert [said(each) for each in examples(f"math:{source}", levels=[5])] == [
        [("user", "p"), ("assistant", "so \\boxed{2}")]
    ]
    (tiny, *_) = examples("tiny", "test")
    assert tiny.id == "tiny-test-0"
    assert tiny.chat[1]["content"].rpartition("#### ")[2].isdecimal()
    assert "=" in tiny.chat[1]["content"]


def test_a_tenth_of_a_file_is_held_out_and_a_seed_chooses_a_part(tmp_path: Path) -> None:
    source = written(
        tmp_path / "a.jsonl", [{"question": str(n), "answer": str(n)} for n in range(200)]
    )
    config = from_mapping({"data.source": source, "data.num_samples": 20, "evaluation.samples": 5})
    found = load_examples(config)
    assert (len(found.train), len(found.held_out)) == (20, 5)
    assert not {prompt.id for prompt in found.train} & {prompt.id for prompt in found.held_out}
    assert (
        load_examples(from_mapping({"data.source": source, "evaluation.samples": 0})).held_out == []
    )


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "function", "function": {"name": "add"}}


def calling(calls: Any, result: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Returns a chat that calls a tool once, as OpenAI's API has it."""
    return [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        result or {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "3", "tool_calls": None},
    ]


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA])])
def test_a_chat_keeps_its_calls_and_its_tools(tmp_path: Path, tools: Any) -> None:
    row = {"messages": calling([CALL]), "tools": tools}
    (found,) = examples(written(tmp_path / "a.jsonl", [row]), messages_field="messages")
    assert isinstance(found, Example)
    assert found.tools == [SCHEMA]
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.chat == [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3"},
    ]


ADD = {"name": "add", "arguments": {"a": 1, "to": [{"b": 2}, {"c": 3}]}}
WEATHER = {"name": "weather", "arguments": {"city": "Paris", "unit": {"si": True}, "days": []}}
DEFINED = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in (
        ("add", {"a": {"type": "integer"}}),
        ("weather", {"city": {"type": "string", "enum": ["Paris", None]}}),
    )
]
"""A null in a list is nobody's absence."""


def called(row: Prompt) -> dict[str, Any]:
    """Returns the function that the first answer calls."""
    answer: dict[str, Any] = row.chat[1]
    function: dict[str, Any] = answer["tool_calls"][0]["function"]
    return function


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_nulls_that_arrow_adds_are_left_out(tmp_path: Path, ending: str) -> None:
    """Arrow gives every row of a column the fields of all; `datasets` also writes them to JSON."""
    chats = [calling([{"type": "function", "function": call}]) for call in (ADD, WEATHER)]
    rows = [{"messages": chat, "tools": [tool]} for chat, tool in zip(chats, DEFINED, strict=True)]
    source = tmp_path / f"a.{ending}"
    table = Dataset.from_list(rows)
    if ending == "jsonl":
        table.to_json(source)
        assert '"city":null' in source.read_text()
    else:
        table.to_parquet(source)
    found = examples(str(source), messages_field="messages")
    assert [called(row) for row in found] == [ADD, WEATHER]
    assert [row.tools for row in found if isinstance(row, Example)] == [[each] for each in DEFINED]


def test_a_null_argument_of_a_json_text_is_kept(tmp_path: Path) -> None:
    call = {"function": {"name": "book", "arguments": '{"seat": null}'}}
    (found,) = examples(
        written(tmp_path / "a.jsonl", [{"messages": calling([call])}]), messages_field="messages"
    )
    assert called(found)["arguments"] == {"seat": None}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": calling("add")}, "line 1: in column 'messages' 'add' is not a list"),
        ({"messages": calling([{"name": "add"}])}, "a tool call in column 'messages' is"),
        (
            {"messages": calling([{"function": {"name": "add", "arguments": "{"}}])},
            "not a function with a name and arguments",
        ),
        (
            {"messages": [{"role": "tool", "content": "3"}, *calling([CALL])]},
            "a tool's message an answer that calls it",
        ),
        ({"messages": calling([CALL]), "tools": "add"}, "not a list of JSON schemas"),
    ],
)
def test_calls_that_cannot_be_read_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    source = written(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigError, match=message):
        examples(source, messages_field="messages")
