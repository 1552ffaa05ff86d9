"""Inputs of the reward-server, and the sampling seeds of groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.wire.schemas import Completion, FinishReason, Prompt, RewardItem


class Asked(Protocol):
    """The problem that a group of answers belongs to."""

    prompt_id: str
    prompt: str
    ground_truth: str


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer of a model."""

    text: str
    finish_reason: FinishReason
    tokens: int | None
    """Length including the end-of-sequence token; None when the server does not report it."""
    token_ids: Sequence[int] | None = None
    """The token ids, if known."""


def row_of(group: Asked, rows: Mapping[str, Prompt]) -> Prompt:
    """Returns the row of a group as the run recorded it, with the further columns that it has in
    the data set.
    """
    own = {"prompt": group.prompt, "ground_truth": group.ground_truth}
    row = rows.get(group.prompt_id)
    return row.model_copy(update=own) if row else Prompt(id=group.prompt_id, **own)


def reward_items(
    prompt: Prompt, completions: Sequence[Completion | GeneratedAnswer], with_tokens: bool = False
) -> list[RewardItem]:
    """Returns the reward-server's input for completions of one prompt, `with_tokens` as a column
    `completion_ids`.

    They are not validated here: the reward-server does that, and rejects items that are too long.
    """
    items: list[RewardItem] = []
    for completion in completions:
        item = RewardItem.model_construct(
            prompt=prompt.prompt,
            response=completion.text,
            ground_truth=prompt.ground_truth,
            finish_reason=completion.finish_reason,
            task=prompt.task,
            columns=prompt.columns,
        )
        if with_tokens and completion.token_ids is not None:
            completion_ids = [int(token) for token in completion.token_ids]
            item.columns = prompt.columns | {"completion_ids": completion_ids}
        items.append(item)
    return items


def sampling_seed(seed: int, position: int) -> int:
    """Returns the sampling seed of the group at `position` of the stream, different for every run
    seed; fits in 31 bits.
    """
    return (seed * 0x9E3779B1 + position * 0x85EBCA6B + 1) & 0x7FFFFFFF
