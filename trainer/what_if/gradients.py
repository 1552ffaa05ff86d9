"""Which groups, and which of their tokens, made the gradient of a recorded step: recomputed, group
by group, from the audit.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.wire.schemas import Float32
from learning.device import reproducible_numbers
from trainer.audit.history import models_after
from trainer.audit.recorded import RecordedStep, config_of
from trainer.observe.audit import AuditRecord
from trainer.observe.group_files import RecordedGroup
from trainer.policy.learn import fill

_TOKENS = 3


@dataclass(frozen=True)
class GroupGradient:
    """The part of a step's gradient that a group makes."""

    id: str
    norm: float
    share: float
    """The part of the whole gradient, along its direction: the shares of all groups and of the KL
    term add up to 1."""
    without: float
    """Norm of the gradient of the step without this group."""
    tokens: list[tuple[int, int, float]]
    """The tokens that push most, as completion, index and |advantage| · (1 − probability), by which
    the gradient of a token grows."""


@dataclass(frozen=True)
class StepGradient:
    """The gradient of a step, before any update on its batch."""

    norm: float
    groups: list[GroupGradient]
    """Those that carry most of it first."""


def step_gradient(run_dir: Path, step: int) -> StepGradient:
    """Recomputes the gradient of a step and the part of each of its groups, in one process.

    Costs the updates since the newest checkpoint before it, and two passes over the batch. Raises
    ConfigError when the audit record is missing or damaged.
    """
    record = AuditRecord(run_dir)
    recorded = RecordedStep.read(run_dir, record, step)
    config = config_of(recorded.start, run_dir)
    with reproducible_numbers(config.reproducible):
        history = models_after(record, run_dir, config, step - 1)
        policy = history.policy
        batch = recorded.batch(config)
        policy.assign(batch)
        fill(policy, history.reference, history.critic, batch)
        assert batch.advantages is not None
        advantages = batch.advantages

        def gradient(rows: range) -> Tensor:
            """Returns the gradient with only the advantages of these rows, and the KL term."""
            batch.advantages = [
                values if row in rows else np.zeros_like(values)
                for row, values in enumerate(advantages)
            ]
            parts = [part.flatten() for part in policy.gradient(batch)]
            return torch.cat(parts or [torch.zeros(1)])

        whole = gradient(range(len(advantages)))
        rest = gradient(range(0))  # of the KL and the entropy, which do not depend on advantages
        found = []
        for item, rows in zip(recorded.groups, batch.parts, strict=True):
            own = range(*rows.indices(len(advantages)))
            has_gradient = any(advantages[row].any() for row in own)
            part = gradient(own) - rest if has_gradient else torch.zeros_like(whole)
            found.append(
                GroupGradient(
                    id=item.group.id,
                    norm=float(part.norm()),
                    share=float(part @ whole / (whole @ whole).clamp(min=1e-30)),
                    without=float((whole - part).norm()),
                    tokens=_tokens(item, advantages[rows]),
                )
            )
    found.sort(key=lambda each: -each.share)
    return StepGradient(float(whole.norm()), found)


def _tokens(item: RecordedGroup, advantages: Sequence[Float32]) -> list[tuple[int, int, float]]:
    found = [
        (number, token, weight)
        for number, completion in enumerate(item.group.completions)
        for token, weight in enumerate(
            np.abs(completion.spread(advantages[number])) * (1 - np.exp(completion.logprobs))
        )
    ]
    largest = heapq.nlargest(_TOKENS, found, key=lambda each: each[2])
    return [(number, token, float(weight)) for number, token, weight in largest]
