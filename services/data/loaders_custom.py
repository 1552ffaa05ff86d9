"""Data sets of one's own: columns or chats, in files or on the hub, changed by a function where they need to be."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.schemas import Prompt
from services.data.loaders_base import RowLoader
from services.data.rows import MAX_ID_CHARS, final_answer, further_columns, read_chat, stated_answer, stop, text_of

MapRow = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Columns of a row -> the columns to read instead, or None to leave the row out."""


class CustomDatasetLoader(RowLoader):
    """Rows with a problem and an answer, or with a chat.

    A column `id` names a problem; it must be unique. All columns that are not read are in `Prompt.columns`.

    Args:
        source: a file (.jsonl, .json, .csv, .parquet), a directory with a file per split, or `org/name` on the hub.
        prompt_field: column of the problem.
        answer_field: column of the answer; of a text with `#### N` only N is kept.
        messages_field: column of a chat, in the place of `prompt_field`: any system messages (they come before the problem),
            one user message, and at most one answer. Where there is no column `answer_field`, the chat's answer is the worked
            solution and what it states last (`#### N` or a box) the ground truth.
        task: which reward functions grade the answers; empty for the default ones.
        task_field: column with the task of each row, where a data set mixes tasks; empty: `task` for all.
        columns: names of the further columns to keep; all of them when None.
        map: changes every row before it is read, or leaves it out.
        hub_config: configuration of a data set on the hub that has several; empty for the default one.
    """

    def __init__(
        self,
        source: str | Path,
        prompt_field: str = "question",
        answer_field: str = "answer",
        messages_field: str = "",
        task: str = "",
        task_field: str = "",
        columns: Sequence[str] | None = None,
        map: MapRow | None = None,
        hub_config: str = "",
    ) -> None:
        super().__init__(source, hub_config, "", task)
        self.prompt_field, self.answer_field, self.messages_field = prompt_field, answer_field, messages_field
        self.task_field, self.columns, self.map = task_field, columns, map

    def _prompt(self, row: dict[str, Any], where: str, default_id: str) -> Prompt | None:
        changed = self._mapped(row, where)
        if changed is None:
            return None
        text, answer = self._problem(changed, where)
        if not answer:
            remedy = "give every row an answer, or remove it"
            stop(f"{where}: the answer in column {self.answer_field!r} is empty", where, remedy)
        used = [self.messages_field or self.prompt_field, self.answer_field, self.task_field, "id"]
        return Prompt(
            id=text_of(changed, "id", where, "the column id", MAX_ID_CHARS) if "id" in changed else default_id,
            prompt=text,
            ground_truth=answer,
            task=text_of(changed, self.task_field, where, "--data.task_field") if self.task_field else self.task,
            columns=further_columns(changed, used, self.columns, where),
        )

    def _problem(self, row: dict[str, Any], where: str) -> tuple[str, str]:
        """(problem, ground truth)"""
        if not self.messages_field:
            text = text_of(row, self.prompt_field, where, "--data.prompt_field")
            return text, final_answer(text_of(row, self.answer_field, where, "--data.answer_field"))
        text, solution = read_chat(row, self.messages_field, where)
        if solution is None or self.answer_field in row:
            return text, final_answer(text_of(row, self.answer_field, where, "--data.answer_field"))
        return text, stated_answer(solution)

    def _mapped(self, row: dict[str, Any], where: str) -> dict[str, Any] | None:
        if self.map is None:
            return row
        try:
            changed = self.map(dict(row))
        except Exception as error:  # whatever a function of the operator's raises
            reason = f"{type(error).__name__}: {error}"
            raise _refused(f"{where}: the function failed ({reason})", _name(self.map), "repair it, or the row") from error
        if changed is not None and not isinstance(changed, Mapping):
            problem = f"{where}: the function returned {changed!r:.80}"
            raise _refused(problem, _name(self.map), "return a mapping of columns, or None to leave the row out")
        return None if changed is None else dict(changed)


def _name(function: MapRow) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _refused(message: str, name: str, remedy: str) -> ConfigError:
    return ConfigError(message, field="data.map", value=name, remedy=remedy)
