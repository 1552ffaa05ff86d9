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

from common.process import watchdog
from common.wire.schemas import Completion, Float32
from learning.device import reproducible_numbers
from trainer.audit.history import models_after
from trainer.audit.recorded import RecordedStep, config_of
from trainer.observe.audit import AuditRecord
from trainer.policy.learn import fill_columns

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
    pushing: list[list[int]]
    """The tokens that push most, at most one of an answer and after what was before it, by
    |advantage| · (1 − probability), with which the gradient of a token grows."""


def step_gradient(run_dir: Path, step: int) -> tuple[float, list[GroupGradient]]:
    """Recomputes the gradient of a step, before any update on its batch, in one process. Returns
    its norm and the part of each group.

    Costs the updates since the newest checkpoint before it, and two passes over the batch. Raises
    ConfigError when the audit record is missing or damaged.
    """
    record = AuditRecord(run_dir)
    recorded = RecordedStep.read(run_dir, record, step)
    config = config_of(recorded.start, run_dir)
    with reproducible_numbers(config.reproducible):
        history = models_after(record, run_dir, config, step - 1)
        watchdog.at(f"computing the gradient of step {step}, group by group")
        policy = history.policy
        batch = recorded.batch(config)
        fill_columns(policy, history.reference, history.critic, batch)
        assert batch.advantages is not None
        advantages = batch.advantages

        def gradient(rows: slice) -> Tensor:
            """Returns the gradient with only the advantages of these rows, and the KL term."""
            batch.advantages = [np.zeros_like(values) for values in advantages]
            batch.advantages[rows] = advantages[rows]
            parts = [part.flatten() for part in policy.gradient(batch)]
            return torch.cat(parts or [torch.zeros(1)])

        whole = gradient(slice(None))
        rest = gradient(slice(0))  # of the KL and the entropy, which do not depend on advantages
        found = []
        for item, rows in zip(recorded.groups, batch.parts, strict=True):
            has_gradient = any(values.any() for values in advantages[rows])
            part = gradient(rows) - rest if has_gradient else torch.zeros_like(whole)
            found.append(
                GroupGradient(
                    id=item.group.id,
                    norm=float(part.norm()),
                    share=float(part @ whole / (whole @ whole).clamp(min=1e-30)),
                    without=float((whole - part).norm()),
                    pushing=_pushing(item.group.completions, advantages[rows]),
                )
            )
    return float(whole.norm()), found


def _pushing(completions: Sequence[Completion], advantages: Sequence[Float32]) -> list[list[int]]:
    found: list[tuple[float, list[int]]] = []
    for completion, own in zip(completions, advantages, strict=True):
        weights = np.abs(completion.spread(own)) * (1 - np.exp(completion.logprobs))
        at = int(weights.argmax())
        found.append((float(weights[at]), completion.token_ids[: at + 1].tolist()))
    return [tokens for _, tokens in heapq.nlargest(_TOKENS, found)]
