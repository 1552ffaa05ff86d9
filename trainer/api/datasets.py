"""Reads the data sets and reward functions that callers of the Python API give."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from common.schemas import Prompt
from services.data.rows import final_answer, further_columns, id_of, read_chat, refuse_same_ids, stop_at, text_of
from services.reward.functions import RewardFunction

_PROMPT_COLUMNS, _ANSWER_COLUMNS = ("prompt", "question"), ("ground_truth", "answer")
_ROLES = ("system", "user", "assistant")


def as_prompts(dataset: Iterable[Any], field: str) -> list[Prompt]:
    """Returns the prompts of a data set.

    A row needs `prompt` or `question`, a text or a chat (`[{"role": …, "content": …}]`, the user last), and may have
    `ground_truth` or `answer` (of a text with `#### N` only N is kept), `id` and `task`. Its other columns stay with it
    for the reward functions.

    Args:
        dataset: prompts, rows, or anything with a length that yields rows, such as a `datasets.Dataset`.
        field: name of the argument, for errors and for the ids of rows without one.

    Raises:
        ConfigError: the data set is empty or not a list, or a row cannot be used; the error names row and column.
    """
    if isinstance(dataset, str | bytes | Mapping) or not hasattr(dataset, "__len__"):
        splits = f"its keys are {', '.join(map(str, dataset))}; " if isinstance(dataset, Mapping) else ""
        raise ConfigError(
            f"{type(dataset).__name__} is not a list of problems",
            field=field,
            remedy=f"{splits}give one split: a list of prompts, a list of rows, or a Hugging Face Dataset",
        )
    try:
        prompts = [_prompt(item, f"{field}-{number}", f"row {number}") for number, item in enumerate(dataset)]
    except ConfigError as error:  # names the setting of the data-server
        raise ConfigError(error.message, field=field, value=error.value, remedy=error.remedy) from None
    if not prompts:
        raise ConfigError("the data set is empty", field=field, value=[], remedy="give it at least one problem")
    refuse_same_ids(prompts, field)
    return prompts


def _prompt(item: Any, default_id: str, where: str) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if not isinstance(item, Mapping):
        stop_at(where, f"{item!r:.80} is not a Prompt or a mapping of columns", "give rows like {'prompt': …, 'answer': …}")
    column = next((name for name in _PROMPT_COLUMNS if item.get(name) is not None), None)
    if column is None:
        there = ", ".join(map(str, item))
        stop_at(where, f"there is no column {' or '.join(_PROMPT_COLUMNS)}; there are {there}", "rename the column")
    chat = [] if isinstance(item[column], str) else read_chat(item, column, where)
    if chat and (chat[-1][0] != "user" or not {role for role, _ in chat} <= {*_ROLES}):
        roles = ", ".join(role for role, _ in chat)
        problem = (
            f"the chat in column {column!r} has the roles {roles}; they must be {', '.join(_ROLES)}, and the last one user"
        )
        stop_at(where, problem, "move the answer into a column of its own, or leave it out")
    answer = next((name for name in _ANSWER_COLUMNS if item.get(name) is not None), "")
    has_answer = answer and str(item[answer]).strip()
    return Prompt(
        id=id_of(item, where, default_id),
        prompt=chat[-1][1] if chat else text_of(item, column, where, column),
        ground_truth=final_answer(text_of(item, answer, where, answer)) if has_answer else "",
        task=str(item.get("task") or ""),
        columns=further_columns(item, (column, answer, "id", "task"), where),
        chat=[{"role": role, "content": text} for role, text in chat] if len(chat) > 1 else [],
    )


def as_rewards(reward_fn: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    """Returns one reward function or several as a list. Raises ConfigError for anything else, and for none."""
    functions = list(reward_fn) if isinstance(reward_fn, Sequence) else [reward_fn]
    for function in functions:
        if not isinstance(function, RewardFunction):
            hint = " (add parentheses to make an instance)" if isinstance(function, type) else ""
            raise ConfigError(
                "this is not a reward function",
                field="reward_fn",
                value=function,
                remedy=f"give an instance of a subclass of RewardFunction{hint}",
            )
    if not functions:
        raise ConfigError("there is no reward function", field="reward_fn", value=[], remedy="give at least one")
    return functions
