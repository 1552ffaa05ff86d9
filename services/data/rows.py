"""Reads the columns of a data set's row: texts, final answers, chats, and further columns as
JSON.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from pydantic_core import to_jsonable_python

from common import Json
from common.errors import ConfigError
from common.prompts.answer_text import answering_part, without_thoughts
from common.prompts.stated_answers import stated_answer as last_stated_answer
from common.wire.schemas import Prompt

Cells = Mapping[str, Any]
"""The cells of a row, by the names of their columns."""
Row = tuple[str, Json]
"""Location of the row, for errors (`train.jsonl, line 3`), and its columns."""
MAX_TEXT_CHARS = 1_000_000
MAX_ID_CHARS = 512
_REPAIR = "repair the row, or remove it"
# Roles of chats in other formats, and what they are called here.
_ROLES_ELSEWHERE = {
    "human": "user",
    "gpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_LETTERS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["'].*\}\s*\]\s*""", re.DOTALL)
_GROUPED = re.compile(r"[-+]?\$?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")


def stop(message: str, value: object, remedy: str, field: str = "data.source") -> NoReturn:
    """Raises ConfigError."""
    raise ConfigError(message, field=field, value=str(value), remedy=remedy)


class BadRow(ConfigError):
    """A row that cannot be read; `row_at` adds where it is."""


def refuse(
    problem: str, remedy: str = _REPAIR, field: str = "data.source", value: str | None = None
) -> NoReturn:
    """Raises BadRow. Without a `value`, `row_at` shows the place of the row as the value."""
    raise BadRow(problem, field=field, value=value, remedy=remedy)


@contextmanager
def row_at(where: str, field: str | None = None) -> Iterator[None]:
    """Says in the errors of a row where it is (`train.jsonl, line 3`), and names `field` instead of
    a setting of the data-server.
    """
    try:
        yield
    except BadRow as error:
        raise ConfigError(
            f"{where}: {error.message}",
            field=field or error.field,
            value=where if error.value is None else error.value,
            remedy=error.remedy,
            settings=error.settings,
        ) from error.__cause__


def refuse_same_ids(prompts: Iterable[Prompt], field: str) -> None:
    """Raises ConfigError when two prompts have the same id."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            stop(
                f"two problems have the id {prompt.id!r}",
                prompt.id,
                "make the ids unique, or remove them",
                field,
            )
        seen.add(prompt.id)


def _value(row: Cells, column: str, *settings: str) -> Any:
    if column not in row:
        raise BadRow(
            f"there is no column {column!r}; there are {', '.join(map(str, row))}",
            field="data.source",
            remedy=f"set {' or '.join(settings)}",
            settings=settings,
        )
    return row[column]


def text_of(row: Cells, column: str, *settings: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Returns a column as text, from a text or a number.

    `settings` are those that name the column, for the remedy when it is missing. Raises BadRow
    when the column is absent, empty, too long, or neither a text nor a number.
    """
    value = _value(row, column, *settings)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # libraries return integer columns with gaps as floats
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        refuse(f"column {column!r} is {value!r:.80}, not a text or a number")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        refuse(f"column {column!r} is not text: {error.reason}")
    if not text.strip() or len(text) > limit:
        refuse(f"column {column!r} is empty or over {limit} characters")
    return text


def refuse_chat_as_text(text: str, column: str) -> None:
    """Raises ConfigError for a problem that is the text of a list of messages, as a CSV file or
    `str(chat)` has them: the model would read brackets and quotes.
    """
    if _CHAT_AS_TEXT.fullmatch(text):
        refuse(
            f"column {column!r} is a list of messages written as a text: {text:.60}",
            "name the column in data.messages_field, which reads JSON; with the Python API give a "
            "list (json.loads)",
        )


def id_of(row: Cells, default: str) -> str:
    """Returns the column `id`, or `default` when it is absent or null."""
    if row.get("id") is None:
        return default
    return text_of(row, "id", "the column id", limit=MAX_ID_CHARS)


def answer_of(row: Cells, column: str, setting: str) -> str:
    """Returns the final answer in a column, a text, a number, or a list of one. Raises ConfigError
    as `text_of` does.
    """
    value = _value(row, column, setting)
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return final_answer(text_of({column: value}, column, setting))


def final_answer(text: str) -> str:
    """Returns N from a text with `#### N`, else the stripped text.

    Thousands separators (`1,080`, `1 000`) are removed if N is a single number; `(1, 2)` stays
    unchanged.
    """
    _, marker, tail = text.rpartition("####")
    # Other white space is kept: \t may be what is left of \theta, which `golds` reports.
    tail = tail.lstrip(" \n").rstrip()
    if marker and _GROUPED.fullmatch(tail):
        return re.sub("[, ]", "", tail)
    return tail


def stated_answer(solution: str) -> str:
    """Returns the final answer that a worked solution states outside thoughts, else all of it."""
    text = answering_part(solution)
    answer = last_stated_answer(text) or without_thoughts(solution).strip()
    return final_answer(f"#### {answer}") if _GROUPED.fullmatch(answer) else answer


def further_columns(row: Cells, used: Iterable[str], only: Iterable[str] | None = None) -> Json:
    """Returns the columns that accompany the problem, as JSON values: those in `only`, or all that
    are not `used`.

    Raises ConfigError when a column is absent, or JSON cannot represent it (an image).
    """
    names = [name for name in row if name not in set(used)] if only is None else list(only)
    absent = next((name for name in names if name not in row), None)
    if absent:
        there = ", ".join(map(str, row))
        refuse(
            f"there is no column {absent!r}; there are {there}",
            "name columns that every row has",
            field="data.columns",
            value=absent,
        )
    return {str(name): _as_json(row[name], name) for name in names}


def _as_json(value: Any, column: str) -> Any:
    """Converts a value to JSON: arrays to lists, dates and decimals to text, non-finite numbers to
    null.
    """
    try:
        # Arrays and scalars of numpy and torch have `tolist`.
        found = to_jsonable_python(
            value, inf_nan_mode="null", fallback=lambda other: other.tolist()
        )
        json.dumps(found, ensure_ascii=False).encode()  # lone surrogates cannot be sent
    except (ValueError, AttributeError, RecursionError) as error:
        refuse(
            f"column {column!r} is of type {type(value).__name__}, which JSON cannot represent: "
            f"{error}",
            "keep only the columns that the reward functions need (data.columns), or convert it to "
            "text (data.map)",
            field="data.columns",
            value=column,
        )
    return found


def read_chat(row: Cells, column: str) -> list[tuple[str, str]]:
    """Returns (role, text) for every message of a chat. Raises ConfigError unless it is a non-empty
    chat.

    The column is `[{"role": …, "content": …}, …]` or its JSON text. A content is a text or a list
    of text parts.
    """
    return [read_message(message, column) for message in messages_of(row, column)]


def messages_of(row: Cells, column: str) -> Sequence[Any]:
    """Returns the messages in a column, a list or its JSON text. Raises ConfigError for anything
    else, and for an empty list.
    """
    messages = value = _value(row, column, "data.messages_field")
    if isinstance(value, str):
        try:
            messages = json.loads(value)
        except (ValueError, RecursionError) as error:
            refuse(f"column {column!r} is not a list of messages: {error}")
    if not isinstance(messages, list | tuple) or not messages:
        refuse(f"column {column!r} is {value!r:.80}, which is not a list of messages")
    return messages


def has_form(roles: Iterable[str], form: str) -> bool:
    """Whether the roles of a chat match a regular expression over their first letters; roles that
    are not known match none.
    """
    return re.fullmatch(form, "".join(_LETTERS.get(role, "?") for role in roles)) is not None


def read_message(message: object, column: str) -> tuple[str, str]:
    """Returns (role, text) of a message. Raises ConfigError when it has no role or no text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        refuse(
            f"a message in column {column!r} is {message!r:.80}, not an object with role and "
            "content",
            "rename its fields to role and content, or repair the row",
        )
    role = message["role"]
    if role in _ROLES_ELSEWHERE:
        refuse(
            f"a message in column {column!r} has the role {role!r}",
            f"rename it to {_ROLES_ELSEWHERE[role]!r}",
        )
    content = message.get("content")
    if isinstance(content, list):
        is_text = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
        content = "\n".join(str(part.get("text")) for part in content) if is_text else None
    named = f"{column} ({role})"
    if not isinstance(content, str):
        refuse(f"column {named!r} is {message.get('content')!r:.80}, not a text")
    return role, text_of({named: content}, named, "data.messages_field")
