"""Which groups, and which of their tokens, made the gradient of a recorded step: recomputed, group
by group, from the audit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.wire.schemas import Float32
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from trainer.audit.history import WeightHistory
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
    """Of the whole gradient, along its direction: the shares of all groups and of the KL term have
    the sum 1."""
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
    start = recorded.start
    device = "cpu" if start.setup.device == "cpu" else "auto"
    config = config_of(start, run_dir, device)
    ranks = Ranks.alone(config)
    with reproducible_numbers(config.reproducible):
        history = WeightHistory(record, run_dir, config, ranks, first=step - 1)
        history.load()
        while history.policy.step < step - 1:
            history.advance()
        policy = history.policy
        batch = recorded.batch(config)
        policy.assign(batch)
        fill(policy, history.reference, history.critic, batch)
        assert batch.advantages is not None
        advantages = batch.advantages

        def gradient(rows: Sequence[int]) -> Tensor:
            """Returns the gradient with only the advantages of these rows, and the KL term."""
            batch.advantages = [
                values if row in rows else np.zeros_like(values)
                for row, values in enumerate(advantages)
            ]
            parts = policy.gradient(batch)
            return torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(1)

        whole = gradient(range(len(advantages)))
        rest = gradient(())  # of the KL and the entropy, which do not depend on advantages
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
    found = []
    for number, completion in enumerate(item.group.completions):
        chance = np.exp(completion.logprobs)
        weights = np.abs(completion.spread(advantages[number])) * (1 - chance)
        found += [
            (number, token, float(weights[token])) for token in np.argsort(-weights)[:_TOKENS]
        ]
    found.sort(key=lambda each: -each[2])
    return [(number, int(token), weight) for number, token, weight in found[:_TOKENS]]
