"""Your own data sets: columns or chats, in files or on the hub, optionally changed by a
function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.wire.schemas import Prompt
from services.data.loaders_base import RowLoader
from services.data.rows import (
    Cells,
    answer_of,
    further_columns,
    has_form,
    id_of,
    read_chat,
    refuse,
    refuse_chat_as_text,
    stated_answer,
    text_of,
)

# Column with the tests of a program: such a row needs no answer.
_TESTS = "test_cases"


@dataclass
class CustomDatasetLoader(RowLoader):
    """Rows with a problem and an answer, or with a chat.

    A column `id` names a problem; it must be unique. All columns that are not read are in
    `Prompt.columns`.

    Args:
        source: a file (.jsonl, .json, .csv, .parquet), a directory with a file per split, or
            `org/name` on the hub.
        prompt_field: column of the problem.
        answer_field: column of the answer; from a text with `#### N`, only N is kept.
        messages_field: column of a chat, instead of `prompt_field`: system messages (they precede
            the problem), one user message, and at most one answer. Without a column `answer_field`,
            the chat's answer is the worked solution, and its final answer (`#### N` or a box) the
            ground truth.
        task: task of the prompts, which selects their reward functions; empty for the default ones.
        task_field: column with the task of each row, if a data set mixes tasks; empty: `task` for
            all.
        columns: names of further columns to keep; all when None.
        hub_config: configuration of a hub data set that has several; empty for the default one.
    """

    prompt_field: str = "question"
    answer_field: str = "answer"
    messages_field: str = ""
    task_field: str = ""
    columns: Sequence[str] | None = None

    def _prompt(self, row: Cells, default_id: str) -> Prompt:
        text, answer = self._problem(row)
        if not answer and _TESTS not in row:
            refuse(
                f"the answer in column {self.answer_field!r} is empty",
                "give every row an answer, or remove the rows without one",
            )
        task = self.task
        if self.task_field:
            task = text_of(row, self.task_field, "data.task_field")
        used = [self.messages_field or self.prompt_field, self.answer_field, self.task_field, "id"]
        return Prompt(
            id=id_of(row, default_id),
            prompt=text,
            ground_truth=answer,
            task=task,
            columns=further_columns(row, used, self.columns),
        )

    def _problem(self, row: Cells) -> tuple[str, str]:
        """Returns (problem, ground truth)."""
        if self.messages_field:
            messages = read_chat(row, self.messages_field)
            text, solution = _single_turn(messages, self.messages_field)
            if solution is not None and self.answer_field not in row:
                return text, stated_answer(solution)
        else:
            text = text_of(row, self.prompt_field, "data.prompt_field")
            refuse_chat_as_text(text, self.prompt_field)
        if _TESTS in row and row.get(self.answer_field) is None:
            return text, ""
        return text, answer_of(row, self.answer_field, "data.answer_field")


def _single_turn(messages: list[tuple[str, str]], column: str) -> tuple[str, str | None]:
    """Returns (problem, answer of the assistant or None); system messages precede the problem,
    after an empty line each.
    """
    roles = [role for role, _ in messages]
    if not has_form(roles, "s*ua?"):
        refuse(
            f"the chat in column {column!r} has the roles {', '.join(roles)}; a problem is any "
            "number of system messages, one user message, and at most one answer of the assistant",
            "turn the rows into such chats, or into columns, with data.map",
        )
    _, last = messages[-1]
    solution = last if roles[-1] == "assistant" else None
    asked = messages if solution is None else messages[:-1]
    return "\n\n".join(text for _, text in asked), solution
