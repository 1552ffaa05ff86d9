"""Reads the data sets and reward functions that callers of the Python API give."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from common import Json
from common.errors import ConfigError
from common.models.hub import check_model
from common.wire.schemas import Prompt
from services.data.rows import (
    answer_of,
    further_columns,
    id_of,
    read_chat,
    refuse,
    refuse_chat_as_text,
    refuse_same_ids,
    row_at,
    text_of,
)
from services.reward.functions import RewardFunction, RewardModelFunction
from services.reward.functions.plain import FunctionLog, PlainFunction, numbered

_PROMPT_COLUMNS = ("prompt", "question")
_ANSWER_COLUMNS = ("ground_truth", "answer")
_ROLES = ("system", "user", "assistant")
# Arguments of a reward function that are not columns.
_ARGUMENTS = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
)


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
        splits = ""
        if isinstance(dataset, Mapping):
            splits = f"its keys are {', '.join(map(str, dataset))}; "
        raise ConfigError(
            f"{type(dataset).__name__} is not a list of problems",
            field=field,
            remedy=f"{splits}give one split: a list of prompts, a list of rows, a DataFrame or a "
            "Hugging Face Dataset",
        )
    rows = rows if hasattr(rows, "__len__") else islice(rows, at_most)
    prompts: list[Prompt] = []
    for number, item in enumerate(rows):
        with row_at(f"row {number}", field):
            prompts.append(_prompt(item, f"{field}-{number}"))
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
    found = []
    for name, dataset in datasets.items():
        if not str(name) or "/" in str(name):
            raise ConfigError(
                "this name of a data set cannot start an id",
                field=field,
                value=name,
                remedy="give it a name without a slash",
            )
        for prompt in as_prompts(dataset, f"{field}[{str(name)!r}]"):
            found.append(prompt.model_copy(update={"id": f"{name}/{prompt.id}"}))
    return found


def _rows(dataset: Any) -> Iterable[Any]:
    """Returns the rows of a DataFrame (pandas, polars) or an Arrow table, and any other data set as
    it is.
    """
    for method in ("to_dicts", "to_pylist"):
        if hasattr(dataset, method):
            return cast("list[Any]", getattr(dataset, method)())
    if hasattr(dataset, "iloc"):
        return [_pandas_row(row) for row in dataset.to_dict("records")]
    return cast("Iterable[Any]", dataset)


def _pandas_row(row: Mapping[Any, Any]) -> Json:
    """Returns the cells of a row. Arrays become lists, and NaN, pandas' empty cell, becomes
    None.
    """
    cells = {}
    for name, cell in row.items():
        # The comparison of arrays is not a single truth value.
        plain = cell.tolist() if hasattr(cell, "tolist") else cell
        cells[str(name)] = None if plain != plain else plain
    return cells


def _prompt(item: Any, default_id: str) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if not isinstance(item, Mapping):
        refuse(
            f"{item!r:.80} is not a Prompt or a mapping of columns",
            "give rows like {'prompt': …, 'answer': …}",
        )
    column = _column(item, _PROMPT_COLUMNS)
    if column is None:
        there = ", ".join(map(str, item))
        refuse(
            f"there is no column {' or '.join(_PROMPT_COLUMNS)}; there are {there}",
            "rename the column",
        )
    chat = [] if isinstance(item[column], str) else _chat(item, column)
    for name in _ARGUMENTS.intersection(item):
        refuse(f"reward functions already have an argument {name!r}", "rename the column")

    prompt_id = id_of(item, default_id)
    question = chat[-1]["content"] if chat else text_of(item, column, column)
    refuse_chat_as_text(question, column)
    ground_truth = ""
    answer = _column(item, _ANSWER_COLUMNS)
    if answer is not None and str(item[answer]).strip():
        ground_truth = answer_of(item, answer, setting=answer)
    columns = further_columns(item, ("prompt", "ground_truth"))
    if chat:
        columns["prompts"] = chat
    return Prompt(
        id=prompt_id,
        prompt=question,
        ground_truth=ground_truth,
        task=str(item.get("task") or ""),
        columns=columns,
        chat=chat,
    )


def _column(row: Mapping[Any, Any], names: Sequence[str]) -> str | None:
    """Returns the first of `names` that is a column with a value."""
    return next((name for name in names if row.get(name) is not None), None)


def _chat(row: Mapping[Any, Any], column: str) -> list[dict[str, str]]:
    """Returns the messages of a chat that ends with the user's."""
    chat = read_chat(row, column)
    roles = [role for role, _ in chat]
    if roles[-1] != "user" or not set(roles) <= set(_ROLES):
        refuse(
            f"the chat in column {column!r} has the roles {', '.join(roles)}; "
            f"they must be {', '.join(_ROLES)}, and the last one must be user",
            "move the answer into a separate column, or remove it",
        )
    return [{"role": role, "content": text} for role, text in chat]


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
    names = numbered([function.name for function in made])
    for function, name in zip(made, names, strict=True):
        if isinstance(function, PlainFunction | RewardModelFunction):
            function.name = name
    return made


def _reward(function: Any, log: FunctionLog | None) -> RewardFunction:
    if isinstance(function, RewardFunction):
        return function
    if isinstance(function, str | Path):
        name = str(function)
        # The name of a function is not looked for on the hub.
        if "/" not in name and not Path(name).is_dir():
            raise ConfigError(
                "a text names a reward model, but this is neither org/name nor a directory",
                field="reward_fn",
                value=name,
                remedy="give a function itself, not its name, such as accuracy_reward of "
                "rlhf_math.rewards",
            )
        check_model(name, "reward_fn", needs_weights=True)
        return RewardModelFunction(name)
    is_class = isinstance(function, type)
    is_model = hasattr(function, "state_dict")
    if callable(function) and not is_class and not is_model:
        return PlainFunction(function, log=log)
    hint = " (add parentheses to make an instance)" if is_class else ""
    if is_model:
        hint = "; give a reward model by its name on the hub or its directory"
    raise ConfigError(
        "this is not a reward function",
        field="reward_fn",
        value=function,
        remedy="give a function of completions, or an instance of a subclass of "
        f"RewardFunction{hint}",
    )
