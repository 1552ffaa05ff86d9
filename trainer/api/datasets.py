"""Conversion of the data sets and reward functions that callers of the Python API pass."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import orjson

from common.errors import ConfigError
from common.schemas import Prompt
from services.data.loaders import final_answer
from services.reward.functions import RewardFunction

PROMPT_COLUMNS, ANSWER_COLUMNS = ("prompt", "question"), ("ground_truth", "answer")
"""Names of the two columns; the first one that a row has is read."""
_ROLES = ("system", "user", "assistant")


def as_prompts(dataset: Iterable[Any], field: str) -> list[Prompt]:
    """Returns the prompts of a data set.

    A row needs `prompt` or `question`, a text or a chat (`[{"role": …, "content": …}]`, the user last), and may have
    `ground_truth` or `answer` (of a text with `#### N` only N is kept), `id` and `task`. The reward functions get its
    other columns.

    Args:
        dataset: prompts, rows, or a sized iterable of rows, such as a `datasets.Dataset`.
        field: name of the argument, for messages and for the ids of rows without one.

    Raises ConfigError for an empty data set, and for a bad row with its number and column.
    """
    if isinstance(dataset, str | bytes | Mapping) or not hasattr(dataset, "__len__"):
        splits = f"its keys are {', '.join(map(str, dataset))}; " if isinstance(dataset, Mapping) else ""
        remedy = f"{splits}give one split: a list of prompts, a list of rows, or a Hugging Face Dataset"
        raise ConfigError(f"{type(dataset).__name__} is not a list of problems", field=field, remedy=remedy)
    prompts = [_prompt(item, f"{field}-{number}", f"{field}, row {number}") for number, item in enumerate(dataset)]
    if not prompts:
        raise ConfigError("the data set is empty", field=field, value=[], remedy="give it at least one problem")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(
                "two problems have the same id", field=field, value=prompt.id, remedy="make the ids unique, or leave them out"
            )
        seen.add(prompt.id)
    return prompts


def _prompt(item: Any, name: str, where: str) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if not isinstance(item, Mapping):
        _stop("a row is a Prompt or a mapping of columns", where, item, "give rows like {'prompt': …, 'ground_truth': …}")
    row = dict(item)
    column = next((key for key in PROMPT_COLUMNS if row.get(key) is not None), None)
    if column is None:
        _stop(f"a row needs a column {' or '.join(PROMPT_COLUMNS)}", where, ", ".join(map(str, row)), "rename its column")
    problem = row.pop(column)
    chat = [] if isinstance(problem, str) else _chat(problem, f"{where}, column {column}")
    text = chat[-1]["content"] if chat else problem
    if not text.strip():
        _stop("the problem is empty", f"{where}, column {column}", problem, "repair the row, or remove it")
    if len(chat) == 1:
        chat = []  # a single user message is the same as a text
    own, task = row.pop("id", None), row.pop("task", None)
    answer = next((row.pop(key) for key in ANSWER_COLUMNS if row.get(key) is not None), "")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # a column of integers with a missing value is a column of floats
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        _stop("a ground truth is a text or a number", where, answer, "give another column another name")
    return Prompt(
        id=name if own is None else str(own),
        prompt=text,
        ground_truth=final_answer(str(answer)),
        task="" if task is None else str(task),
        columns={str(key): _plain(value, f"{where}, column {key}") for key, value in row.items()},
        chat=chat,
    )


def _chat(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, Sequence) or not messages:
        _stop("a problem is a text or a chat", where, messages, "give a text, or [{'role': 'user', 'content': …}]")
    chat = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            _stop("a message is {'role': …, 'content': text}", where, message, f"use the roles {', '.join(_ROLES)}")
        chat.append({"role": str(role), "content": content})
    if chat[-1]["role"] != "user":
        _stop("the last message of a problem is the user's", where, chat[-1], "leave the answer out, or in another column")
    return chat


def _plain(value: Any, where: str) -> Any:
    """Returns the value as JSON: arrays become lists, dates texts."""
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
    except (TypeError, ValueError) as error:
        _stop(f"the value cannot be sent: {error}", where, value, "keep numbers, texts, lists and mappings")


def _stop(message: str, where: str, value: object, remedy: str) -> NoReturn:
    raise ConfigError(f"{where}: {message}", field=where.partition(",")[0], value=value, remedy=remedy)


def as_rewards(reward_fn: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    """Returns a list of reward functions. Raises ConfigError for another type, or for none."""
    functions = list(reward_fn) if isinstance(reward_fn, Sequence) else [reward_fn]
    for function in functions:
        if not isinstance(function, RewardFunction):
            made = " (make an object of it: add parentheses)" if isinstance(function, type) else ""
            remedy = f"give an instance of a subclass of RewardFunction{made}"
            raise ConfigError("this is not a reward function", field="reward_fn", value=function, remedy=remedy)
    if not functions:
        raise ConfigError("there is no reward function", field="reward_fn", value=[], remedy="give at least one")
    return functions
