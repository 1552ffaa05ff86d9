"""Reads the data sets and reward functions that callers of the Python API give."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from common.errors import ConfigError
from common.wire.schemas import Prompt
from services.data.rows import (
    final_answer,
    further_columns,
    id_of,
    read_chat,
    refuse_same_ids,
    stop_at,
    text_of,
)
from services.reward.functions import RewardFunction, RewardModelFunction
from services.reward.functions.plain import FunctionLog, PlainFunction, numbered

_PROMPT_COLUMNS, _ANSWER_COLUMNS = ("prompt", "question"), ("ground_truth", "answer")
_ROLES = ("system", "user", "assistant")
_ARGUMENTS = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
)
"""Arguments of a reward function that are not columns."""


def as_prompts(dataset: Any, field: str, at_most: int | None = None) -> list[Prompt]:
    """Returns the prompts of a data set.

    A row needs `prompt` or `question`, a text or a chat (`[{"role": …, "content": …}]`, the user
    last), and may have `ground_truth` or `answer` (of a text with `#### N` only N is kept), `id`
    and `task`. Reward functions get all columns, including the original answer, and a chat as
    `prompts`.

    Args:
        dataset: prompts or rows, in anything that yields them: a list, a generator, a
            `datasets.Dataset` or `IterableDataset`, a DataFrame, an Arrow table.
        field: name of the argument, for errors and for the ids of rows without one.
        at_most: maximum rows to read from a data set without a length; all when None.

    Raises:
        ConfigError: the data set is empty, has several splits or no rows, or a row cannot be used;
            the error names row and column.
    """
    rows = dataset if isinstance(dataset, str | bytes | Mapping) else _rows(dataset)
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__iter__"):
        splits = (
            f"its keys are {', '.join(map(str, dataset))}; " if isinstance(dataset, Mapping) else ""
        )
        raise ConfigError(
            f"{type(dataset).__name__} is not a list of problems",
            field=field,
            remedy=f"{splits}give one split: a list of prompts, a list of rows, a DataFrame or a Hugging Face Dataset",
        )
    rows = rows if hasattr(rows, "__len__") else islice(rows, at_most)
    try:
        prompts = [
            _prompt(item, f"{field}-{number}", f"row {number}") for number, item in enumerate(rows)
        ]
    except ConfigError as error:  # names the setting of the data-server
        raise ConfigError(
            error.message, field=field, value=error.value, remedy=error.remedy
        ) from None
    if not prompts:
        raise ConfigError(
            "the data set is empty", field=field, value=[], remedy="give it at least one problem"
        )
    refuse_same_ids(prompts, field)
    return prompts


def as_held_out(datasets: Any, field: str) -> list[Prompt]:
    """Returns the prompts of one data set, or of several by name; the name becomes a prefix of
    their prompt ids.
    """
    if not isinstance(datasets, Mapping):
        return as_prompts(datasets, field)
    named = {
        str(name): as_prompts(dataset, f"{field}[{name!r}]") for name, dataset in datasets.items()
    }
    if strange := [name for name in named if not name or "/" in name]:
        remedy = "give it a name without a slash"
        raise ConfigError(
            "this name of a data set cannot start an id",
            field=field,
            value=strange[0],
            remedy=remedy,
        )
    return [
        prompt.model_copy(update={"id": f"{name}/{prompt.id}"})
        for name, prompts in named.items()
        for prompt in prompts
    ]


def _rows(dataset: Any) -> Iterable[Any]:
    """Returns the rows of a DataFrame (pandas, polars) or an Arrow table, and any other data set as
    it is.
    """
    for method in ("to_dicts", "to_pylist"):
        if hasattr(dataset, method):
            return cast("list[Any]", getattr(dataset, method)())
    if hasattr(dataset, "iloc"):  # pandas writes an empty cell as NaN
        rows = dataset.to_dict("records")
        return [
            {name: None if cell != cell else cell for name, cell in row.items()}
            for row in map(_plain, rows)
        ]
    return cast("Iterable[Any]", dataset)


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the cells of a row; arrays, whose comparison is not a single truth value, as
    lists.
    """
    return {
        str(name): cell.tolist() if hasattr(cell, "tolist") else cell for name, cell in row.items()
    }


def _prompt(item: Any, default_id: str, where: str) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if not isinstance(item, Mapping):
        stop_at(
            where,
            f"{item!r:.80} is not a Prompt or a mapping of columns",
            "give rows like {'prompt': …, 'answer': …}",
        )
    column = next((name for name in _PROMPT_COLUMNS if item.get(name) is not None), None)
    if column is None:
        there = ", ".join(map(str, item))
        stop_at(
            where,
            f"there is no column {' or '.join(_PROMPT_COLUMNS)}; there are {there}",
            "rename the column",
        )
    chat = [] if isinstance(item[column], str) else read_chat(item, column, where)
    if chat and (chat[-1][0] != "user" or not {role for role, _ in chat} <= {*_ROLES}):
        roles = ", ".join(role for role, _ in chat)
        problem = (
            f"the chat in column {column!r} has the roles {roles}; they must be {', '.join(_ROLES)}, "
            "and the last one must be user"
        )
        stop_at(where, problem, "move the answer into a separate column, or remove it")
    answer = next((name for name in _ANSWER_COLUMNS if item.get(name) is not None), "")
    has_answer = answer and str(item[answer]).strip()
    for name in _ARGUMENTS.intersection(item):
        stop_at(where, f"reward functions already have an argument {name!r}", "rename the column")
    kept = (
        {}
        if isinstance(item[column], str)
        else {"prompts": [{"role": role, "content": text} for role, text in chat]}
    )
    return Prompt(
        id=id_of(item, where, default_id),
        prompt=chat[-1][1] if chat else text_of(item, column, where, column),
        ground_truth=final_answer(text_of(item, answer, where, answer)) if has_answer else "",
        task=str(item.get("task") or ""),
        columns=further_columns(item, ("prompt", "ground_truth"), where) | kept,
        chat=[{"role": role, "content": text} for role, text in chat] if len(chat) > 1 else [],
    )


def as_rewards(reward_fn: Any, log: FunctionLog | None = None) -> list[RewardFunction]:
    """Returns one reward function or several as a list of objects.

    Args:
        reward_fn: a RewardFunction, a plain function, the name of a reward model on the hub or its
        directory, or a list.
        log: the run's log for plain functions.

    Raises:
        ConfigError: it is none of these, or there is none.
    """
    several = list(reward_fn) if isinstance(reward_fn, list | tuple) else [reward_fn]
    if not several:
        raise ConfigError(
            "there is no reward function",
            field="reward_fn",
            value=[],
            remedy="give at least one reward function",
        )
    made = [_reward(each, log) for each in several]
    for function, name in zip(made, numbered([function.name for function in made]), strict=True):
        if isinstance(function, PlainFunction):
            function.rename(name)
        elif isinstance(function, RewardModelFunction):
            function.name = name
    return made


def _reward(function: Any, log: FunctionLog | None) -> RewardFunction:
    if isinstance(function, RewardFunction):
        return function
    if isinstance(function, str | Path):
        return RewardModelFunction(str(function))
    if (
        callable(function)
        and not isinstance(function, type)
        and not hasattr(function, "state_dict")
    ):
        return PlainFunction(function, log=log)
    hint = " (add parentheses to make an instance)" if isinstance(function, type) else ""
    if hasattr(function, "state_dict"):
        hint = "; give a reward model by its name on the hub or its directory"
    raise ConfigError(
        "this is not a reward function",
        field="reward_fn",
        value=function,
        remedy=f"give a function of completions, or an instance of a subclass of RewardFunction{hint}",
    )
