"""Examples for supervised fine-tuning: each is a `Prompt` whose chat ends with the answer to
learn.

The data sets are those of `services.data.loaders`. Training from rewards reads only the final
answer; these loaders keep the whole answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.process.imports import import_callable
from common.settings.config import Config
from common.settings.sections import DataSection
from common.wire.schemas import Prompt
from services.data import tiny
from services.data.loaders import Loader, TinyLoader, load_split, loader_of
from services.data.loaders_base import RowLoader
from services.data.loaders_custom import MapRow, mapped
from services.data.loaders_math import GSM8KLoader, MATHLoader
from services.data.rows import further_columns, id_of, read_chat, stop_at, text_of

_ROLES = ("system", "user", "assistant")
Message = dict[str, str]


def example(id: str, chat: list[Message], columns: Mapping[str, Any] | None = None) -> Prompt:
    """Returns the example for a chat whose assistant messages are to be learned. Its prompt is all
    before the last.
    """
    text = "\n\n".join(message["content"] for message in chat[:-1])
    return Prompt(id=id, prompt=text, ground_truth="", chat=chat, columns=dict(columns or {}))


def answered(id: str, question: str, answer: str) -> Prompt:
    """Returns the example for one question and its answer."""
    return example(
        id, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )


class WorkedLoader(RowLoader):
    """Rows with chats (`messages_field`), or with a prompt and an answer, each a text or a list of
    messages.
    """

    def __init__(self, data: DataSection) -> None:
        super().__init__(data.source, data.hub_config)
        self._data = data
        self._map: MapRow | None = import_callable(data.map, "data.map") if data.map else None

    def _prompt(self, row: Mapping[str, Any], where: str, default_id: str) -> Prompt | None:
        changed = row if self._map is None else mapped(self._map, row, where)
        if changed is None:
            return None
        data = self._data
        if data.messages_field:
            chat = _messages(changed, data.messages_field, "", where)
            named = data.messages_field
        else:
            chat = _messages(
                changed, data.prompt_field, "user", where, setting="--data.prompt_field"
            )
            named = data.answer_field
            chat += _messages(changed, named, "assistant", where, setting="--data.answer_field")
        _check(chat, named, where)
        used = {data.messages_field or data.prompt_field, "id"}
        columns = further_columns(changed, used, where) if data.prompt_template else {}
        return example(id_of(changed, where, default_id), chat, columns)


def _messages(
    row: Mapping[str, Any], column: str, role: str, where: str, setting: str = ""
) -> list[Message]:
    """Returns the messages in a column; a text is one message of `role`, if there is one."""
    if role and not isinstance(row.get(column), list | tuple):
        setting += "; of chats, --data.messages_field" if column not in row else ""
        return [{"role": role, "content": text_of(row, column, where, setting)}]
    return [{"role": role, "content": content} for role, content in read_chat(row, column, where)]


def _check(chat: list[Message], column: str, where: str) -> None:
    """Raises ConfigError for a chat that cannot be learned from."""
    roles = [message["role"] for message in chat]
    pairs = zip(["", *roles], roles, strict=False)
    unasked = any(role == "assistant" and before != "user" for before, role in pairs)
    is_known = set(roles) <= set(_ROLES)
    if not is_known or roles[-1] != "assistant" or unasked:
        stop_at(
            where,
            f"the chat that ends with column {column!r} has the roles {', '.join(roles)}; it must "
            "end with the assistant's answer, and every answer must follow a user's message; "
            f"known roles are {', '.join(_ROLES)}",
            "turn the row into such a chat, or leave it out, with data.map",
        )


class _WorkedGSM8K(GSM8KLoader):
    def _prompt(self, row: Mapping[str, Any], where: str, default_id: str) -> Prompt:
        found = super()._prompt(row, where, default_id)
        return answered(found.id, found.prompt, text_of(row, "answer", where, "another source"))


class _WorkedMATH(MATHLoader):
    def _prompt(self, row: Mapping[str, Any], where: str, default_id: str) -> Prompt | None:
        found = super()._prompt(row, where, default_id)
        return found and answered(
            found.id, found.prompt, text_of(row, "solution", where, "another source")
        )


class _WorkedTiny(TinyLoader):
    def _load(self, split: str) -> list[Prompt]:
        name: tiny.Split = "train" if split == "train" else "test"
        # The second is endless.
        pairs = zip(super()._load(split), tiny.problems(name), strict=False)
        return [
            answered(prompt.id, problem.question, problem.solution) for prompt, problem in pairs
        ]


def example_loader(data: DataSection) -> Loader:
    """Returns the loader of the examples of `data.source`. Raises ConfigError like
    `loader_of`.
    """
    plain = loader_of(data)
    if data.source == "tiny":
        return _WorkedTiny()
    if isinstance(plain, GSM8KLoader):
        return _WorkedGSM8K()
    if isinstance(plain, MATHLoader):
        return _WorkedMATH(
            data.levels or None, data.subjects or None, plain.source, data.hub_config
        )
    return WorkedLoader(data)


@dataclass(frozen=True)
class Examples:
    """The examples for training and for evaluation."""

    train: list[Prompt]
    held_out: list[Prompt]
    """Empty: no evaluation."""


def load_examples(config: Config) -> Examples:
    """Returns the examples of `config.data`. Raises ConfigError when they do not load."""
    data = config.data
    count = config.trainer.eval_samples
    train = load_split(data, "train", config.seed, example_loader)
    held_out = list[Prompt]()
    if count:
        held_out = load_split(data, "eval", config.seed, example_loader)[:count]
    return Examples(train, held_out)
