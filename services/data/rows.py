"""What a row of a data set says: texts, final answers, chats, and further columns as JSON. Every problem names the row."""

import datetime
import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NoReturn

from common.errors import ConfigError
from common.marks import last_box

Row = tuple[str, dict[str, Any]]
"""Where the row is, for messages (`train.jsonl, line 3`), and its columns."""

MAX_TEXT_CHARS = 1_000_000
MAX_ID_CHARS = 512
_REPAIR = "repair the row, or remove it"
_GROUPED = re.compile(r"[-+]?\$?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def stop(message: str, value: object, remedy: str, field: str = "data.source") -> NoReturn:
    """Ends the loading with a ConfigError."""
    raise ConfigError(message, field=field, value=str(value), remedy=remedy)


def text_of(row: dict[str, Any], column: str, where: str, setting: str, limit: int = MAX_TEXT_CHARS) -> str:
    """A column as text, from a text or a number. Raises ConfigError when it is absent, empty, too long or something else.

    Args:
        row: columns by name.
        column: its name.
        where: of the row, for messages.
        setting: what to set when there is no such column.
        limit: characters it may have.
    """
    if column not in row:
        stop(f"{where}: there is no column {column!r}; there are {', '.join(map(str, row))}", where, f"set {setting}")
    value = row[column]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with a gap comes as floats
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        stop(f"{where}: column {column!r} is {value!r:.80}, not a text or a number", where, _REPAIR)
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        stop(f"{where}: column {column!r} is not text: {error.reason}", where, _REPAIR)
    if not text.strip() or len(text) > limit:
        stop(f"{where}: column {column!r} is empty or over {limit} characters", where, _REPAIR)
    return text


def final_answer(text: str) -> str:
    """What an answer is compared with: N of a text with `#### N`, else the text, stripped.

    Of N, thousands separators (`1,080`, `1 000`) are left out where it is one number; `(1, 2)` stays as it is.
    """
    _, marker, tail = text.rpartition("####")
    tail = tail.strip()
    if not marker:
        return tail
    return re.sub("[, ]", "", tail) if _GROUPED.fullmatch(tail) else tail


def is_number(answer: str) -> bool:
    """Whether an answer is one plain decimal number."""
    return _NUMBER.fullmatch(answer) is not None


def stated_answer(solution: str) -> str:
    """The final answer of a worked solution: after its last `####`, else in its last box, else all of it."""
    if "####" in solution:
        return final_answer(solution)
    return last_box(solution) or solution.strip()


def further_columns(row: dict[str, Any], used: Iterable[str], only: Iterable[str] | None, where: str) -> dict[str, Any]:
    """The columns that travel beside the problem, as JSON can say them.

    Args:
        row: columns by name.
        used: names of those that were read already.
        only: names to keep, each of which must be there; None for all that were not used.
        where: of the row, for messages.

    Raises ConfigError for a column that is absent, or that JSON cannot say (an image).
    """
    taken = set(used)
    names = [name for name in row if name not in taken] if only is None else list(only)
    if absent := next((name for name in names if name not in row), None):
        stop(
            f"{where}: there is no column {absent!r}; there are {', '.join(map(str, row))}",
            absent,
            "name columns that every row has",
            "data.columns",
        )
    return {name: _as_json(row[name], name, where) for name in names}


def _as_json(value: Any, column: str, where: str) -> Any:
    """A value as JSON: dates and decimals as text, numbers that are not finite as null."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_as_json(item, column, where) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item, column, where) for key, item in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    stop(
        f"{where}: column {column!r} is of type {type(value).__name__}, which JSON cannot say",
        column,
        "name the columns that the reward functions need in data.columns, or turn it into text with data.map",
        "data.columns",
    )


# ---------------------------------------------------------------- chats


def read_chat(row: dict[str, Any], column: str, where: str) -> tuple[str, str | None]:
    """(the problem, the answer of the assistant or None) of a chat: `[{"role": …, "content": …}, …]` or that as JSON text.

    System messages come before the problem, with an empty line between. Raises ConfigError for anything but any system
    messages, one user message, and at most one assistant message after it.
    """
    if column not in row:
        there = ", ".join(map(str, row))
        stop(f"{where}: there is no column {column!r}; there are {there}", where, "set --data.messages_field")
    messages = row[column]
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            stop(f"{where}: column {column!r} is not a list of messages: {error}", where, _REPAIR)
    if not isinstance(messages, list) or not messages:
        stop(f"{where}: column {column!r} is not a list of messages", where, _REPAIR)
    turns = [_message(message, column, where) for message in messages]
    roles = [role for role, _ in turns]
    instructions = len([role for role in roles if role == "system"])
    if roles[instructions:] not in (["user"], ["user", "assistant"]):
        stop(
            f"{where}: the chat in column {column!r} has the roles {', '.join(roles)}; a problem is any system messages, one "
            "user message, and at most one answer of the assistant",
            where,
            "turn the rows into such chats, or into columns, with data.map",
        )
    prompt = "\n\n".join(text for _, text in turns[: instructions + 1])
    return prompt, turns[-1][1] if roles[-1] == "assistant" else None


def _message(message: object, column: str, where: str) -> tuple[str, str]:
    """(role, text) of a message whose content is a text or a list of parts that are texts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        stop(f"{where}: a message in column {column!r} is not an object with role and content", where, _REPAIR)
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        content = None if None in texts else "\n".join(map(str, texts))
    named = f"{column} ({role})"
    if not isinstance(content, str):
        stop(f"{where}: column {named!r} is {message.get('content')!r:.80}, not a text", where, _REPAIR)
    return role, text_of({named: content}, named, where, "--data.messages_field")
