"""Examples for supervised fine-tuning: each is a chat that ends with the answer to learn.

The data sets are those of `services.data.loaders`. Training from rewards reads only the final
answer; these loaders keep the whole answer, and with it the calls of tools.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from common import Json
from common.process.imports import import_callable
from common.settings.config import Config
from common.settings.sections import DataSection
from common.wire.schemas import Columns, Listed, Prompt
from services.data.loaders import Loader, load_split, loader_of
from services.data.loaders_base import RowLoader
from services.data.loaders_math import GSM8KLoader, MATHLoader
from services.data.rows import (
    Cells,
    further_columns,
    has_form,
    id_of,
    messages_of,
    read_message,
    refuse,
    text_of,
)

# The column with the tools of a chat, by the name that chat templates and TRL give it.
_TOOLS = "tools"
Message = Json


class Example(Prompt):
    """A chat whose assistant messages are to be learned. Its prompt is all before the last."""

    chat: Listed[Columns]
    """A message has `role` and `content`, an assistant's also `tool_calls` (each `{"type":
    "function", "function": {"name", "arguments"}}`, with arguments by name)."""
    tools: Listed[Columns] = Field([])
    """What the model may call, as JSON schemas."""
    is_chat: bool = False
    """Whether the row has messages, which need a chat template, and no texts."""


def example(
    id: str,
    chat: list[Message],
    columns: Cells | None = None,
    tools: Sequence[Json] = (),
    *,
    is_chat: bool = False,
) -> Example:
    """Returns the example for a chat."""
    text = "\n\n".join(message["content"] for message in chat[:-1])
    return Example(
        id=id,
        prompt=text,
        ground_truth="",
        chat=chat,
        columns=dict(columns or {}),
        tools=list(tools),
        is_chat=is_chat,
    )


def answered(id: str, question: str, answer: str) -> Example:
    """Returns the example for one question and its answer."""
    return example(
        id, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )


class WorkedLoader(RowLoader):
    """Rows with chats (`messages_field`), or with a prompt and an answer, each a text or a list of
    messages.
    """

    def __init__(self, data: DataSection) -> None:
        super().__init__(
            data.source,
            hub_config=data.hub_config,
            map=import_callable(data.map, "data.map") if data.map else None,
        )
        self._data = data

    def _prompt(self, row: Cells, default_id: str) -> Prompt:
        data = self._data
        tools = list[Json]()
        if data.messages_field:
            chat = _messages(row, data.messages_field, "")
            tools = _tools(row)
            named = data.messages_field
        else:
            chat = _messages(row, data.prompt_field, "user", setting="data.prompt_field")
            named = data.answer_field
            chat += _messages(row, named, "assistant", setting="data.answer_field")
        _check(chat, named)
        used = {data.messages_field or data.prompt_field, "id"}
        columns = further_columns(row, used) if data.prompt_template else {}
        is_chat = bool(data.messages_field) or isinstance(row[data.prompt_field], list | tuple)
        return example(id_of(row, default_id), chat, columns, tools=tools, is_chat=is_chat)


def _messages(row: Cells, column: str, role: str, setting: str = "") -> list[Message]:
    """Returns the messages in a column; a text is one message of `role`, if there is one."""
    if role and not isinstance(row.get(column), list | tuple):
        return [{"role": role, "content": text_of(row, column, setting, "data.messages_field")}]
    return [_message(message, column) for message in messages_of(row, column)]


def _message(message: Any, column: str) -> Message:
    """Returns a message with its calls of tools; one that only calls may lack a content."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if calls and not message.get("content"):
        role = str(message.get("role"))
        text = ""
    else:
        role, text = read_message(message, column)
    found: Message = {"role": role, "content": text}
    if calls:
        if not isinstance(calls, list | tuple):
            refuse(f"in column {column!r} {calls!r:.80} is not a list")
        found["tool_calls"] = [_call(call, column) for call in calls]
    for name in ("name", "tool_call_id"):
        if message.get(name):
            found[name] = str(message[name])
    return found


def _call(call: Any, column: str) -> Json:
    """Returns a call whose arguments are a mapping: chat templates write them as JSON. Only a JSON
    text keeps an argument that is null.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = _from_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        refuse(
            f"a tool call in column {column!r} is {call!r:.80}, not a function with a name and "
            "arguments, a mapping or its JSON text",
        )
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _tools(row: Cells) -> list[Json]:
    """Returns the tools of a row, a list of JSON schemas or its JSON text; none without them. Only
    a JSON text keeps a key of a schema that is null.
    """
    given = row.get(_TOOLS) or []
    tools = _from_json(given)
    is_list = isinstance(tools, list | tuple)
    if not is_list or not all(isinstance(tool, Mapping) for tool in tools):
        refuse(f"column {_TOOLS!r} is {given!r:.80}, not a list of JSON schemas of tools")
    return [dict(tool) for tool in tools]


def _from_json(value: Any) -> Any:
    """Returns what a JSON text says, None for one that is not JSON, and any other value without its
    nulls.
    """
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return json.loads(value)
    except ValueError:
        return None


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys that are null, at any depth.

    Arrow gives a mapping the keys that its namesakes in other rows have, as nulls: in parquet, on
    the hub, and in JSON that `datasets` has written.
    """
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(each) for each in value]
    return value


def _check(chat: list[Message], column: str) -> None:
    """Raises ConfigError for a chat that cannot be learned from."""
    roles = [message["role"] for message in chat]
    # An answer follows a user's or a tool's message; a tool's message follows an answer or another
    # tool's message.
    if not has_form(roles, r"(?:[su]|(?<=[ut])a|(?<=[at])t)*(?<=a)"):
        refuse(
            f"the chat that ends with column {column!r} has the roles {', '.join(roles)}; it must "
            "end with the assistant's answer, every answer must follow a user's message or a "
            "tool's, and a tool's message an answer that calls it; known roles are system, user, "
            "assistant and tool",
            "turn the row into such a chat, or leave it out, with data.map",
        )


def example_loader(data: DataSection) -> Loader:
    """Returns the loader of the examples of `data.source`. Raises ConfigError like
    `loader_of`.
    """
    loader = loader_of(data)
    if isinstance(loader, GSM8KLoader | MATHLoader):
        solution = "solution" if isinstance(loader, MATHLoader) else "answer"
        loader.finish = partial(_worked, solution)
        return loader
    return WorkedLoader(data)


def _worked(solution: str, problem: Prompt, row: Cells) -> Example:
    """Returns the example for a problem whose worked solution is in the column `solution`."""
    return answered(problem.id, problem.prompt, text_of(row, solution, "another source"))


@dataclass(frozen=True)
class Examples:
    """The examples for training and for evaluation."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """Empty: no evaluation."""


def load_examples(config: Config) -> Examples:
    """Returns the examples of `config.data`. Raises ConfigError when they do not load."""
    data = config.data
    count = config.evaluation.samples
    train = load_split(data, "train", config.seed, example_loader)
    held_out = list[Prompt]()
    if count:
        held_out = load_split(data, "eval", config.seed, example_loader)[:count]
    return Examples(train, held_out)
