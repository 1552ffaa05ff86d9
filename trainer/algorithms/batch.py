"""The training batch, the same on every rank, and the micro-batches cut from it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.errors import ConfigError
from common.schemas import Float32, Group, Int32, TokenSequence, ValueTargets
from learning.batching import Indices, Sizes
from learning.layout import Layout, moved

Column = list[Float32]


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group in training."""

    group: Group
    weight: float = 1.0
    """Importance weight of prioritised reuse; 1 for a fresh group."""
    reused: bool = False
    """Whether it was trained on before."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion with its prompt."""

    prompt_ids: Int32
    completion_ids: Int32
    rollout_logprobs: Float32
    """[L] under the policy that sampled the completion."""
    reward: float
    weight: float
    """Importance weight of its group."""
    current: bool
    """Whether the policy about to be updated sampled the whole completion."""
    counts: bool
    """Whether it counts in the loss and its normalisers."""
    corrected: bool
    """False for a reused row that counts as sampled by the policy about to be updated (`replay.corrected` false)."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class Batch:
    """A training batch, the same on every rank.

    A column has one array [L] for each row, or is None where it was not computed. The training loop assigns the columns.
    """

    groups: list[TrainingGroup]
    """Fresh ones first."""
    rows: list[Row]
    """Every completion, group after group."""
    group_size: int
    old_logprobs: Column | None = None
    """Log-probabilities under the policy about to be updated."""
    ref_logprobs: Column | None = None
    """Log-probabilities under the reference model."""
    values: Column | None = None
    """The critic's value of the state before each token."""
    advantages: Column | None = None
    returns: Column | None = None
    """The critic's targets."""

    @classmethod
    def of(cls, groups: list[TrainingGroup], config: Config, step: int = 0) -> "Batch":
        """Makes the batch of `groups` for the update after `step` steps. Raises ConfigError for groups of different sizes."""
        sizes = {len(item.group.completions) for item in groups}
        if len(sizes) != 1:
            raise ConfigError(
                f"the groups of a batch have one size, got {sorted(sizes)}",
                field="sampling.group_size",
                value=config.sampling.group_size,
                remedy="keep it as it was when the replay buffer was filled, or empty that with POST /clear",
            )
        rows = [
            Row(
                item.group.prompt_token_ids,
                completion.token_ids,
                completion.logprobs,
                completion.reward,
                item.weight,
                current=completion.weight_version == step,
                counts=not (config.algorithm.mask_truncated and completion.finish_reason == "length"),
                corrected=config.replay.corrected or not item.reused,
            )
            for item in groups
            for completion in item.group.completions
        ]
        return cls(groups, rows, sizes.pop())

    @property
    def fresh(self) -> list[Group]:
        """The groups that were generated for this batch."""
        return [item.group for item in self.groups if not item.reused]

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each row."""
        return [len(row.completion_ids) for row in self.rows]

    def sizes(self, shared: bool) -> Sizes:
        """Sizes for cutting the batch; `shared` is that of the layout."""
        return Sizes.of([row.prompt_ids for row in self.rows], [row.completion_ids for row in self.rows], shared)

    def sequences(self) -> list[TokenSequence]:
        """Returns the sequences that a critic values."""
        return [TokenSequence(row.prompt_ids, row.completion_ids) for row in self.rows]

    def value_targets(self) -> list[ValueTargets]:
        """Returns the critic's training data."""
        assert self.values is not None
        assert self.returns is not None
        rows = zip(self.rows, self.values, self.returns, strict=True)
        return [ValueTargets(row.prompt_ids, row.completion_ids, values, targets, row.weight) for row, values, targets in rows]

    def rollout_logprobs(self, row: int) -> Float32:
        """Returns [L] under the policy that sampled the row, or counts as that (`Row.corrected`)."""
        if self.rows[row].corrected:
            return self.rows[row].rollout_logprobs
        assert self.old_logprobs is not None
        return self.old_logprobs[row]

    def mean_advantages(self) -> list[list[float]]:
        """Returns the mean |advantage| of every completion, by group."""
        assert self.advantages is not None
        means = [float(np.abs(advantages).mean()) for advantages in self.advantages]
        return [means[i : i + self.group_size] for i in range(0, len(means), self.group_size)]


@dataclass(slots=True)
class MicroBatch:
    """Rows of a batch as tensors [C], where C is the number of completion tokens of all rows together."""

    tokens: Layout
    targets: Tensor
    """The completion tokens, row by row."""
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    current: Tensor
    """1 where the policy about to be updated sampled the token."""
    rows: Tensor
    """The row that each completion token belongs to."""
    lengths: Tensor
    """Completion length of that row."""
    count: int
    """Rows."""

    @classmethod
    def of(cls, batch: Batch, indices: Indices, layout: type[Layout]) -> "MicroBatch":
        """The rows of `batch` at `indices`."""
        rows = [batch.rows[i] for i in indices.tolist()]
        lengths = np.array([len(row.completion_ids) for row in rows])

        def tokens(column: Column | None) -> Tensor | None:
            return None if column is None else torch.from_numpy(np.concatenate([column[i] for i in indices.tolist()]))

        def repeated(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

        advantages = tokens(batch.advantages)
        assert advantages is not None
        return cls(
            tokens=layout.of([row.prompt_ids for row in rows], [row.completion_ids for row in rows]),
            targets=torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64)),
            rollout_logprobs=torch.from_numpy(np.concatenate([batch.rollout_logprobs(i) for i in indices.tolist()])),
            old_logprobs=tokens(batch.old_logprobs),
            ref_logprobs=tokens(batch.ref_logprobs),
            advantages=advantages,
            weights=repeated([row.weight for row in rows]),
            current=repeated([float(row.current) for row in rows]),
            rows=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
            lengths=torch.from_numpy(np.repeat(lengths, lengths)),
            count=len(rows),
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns the micro-batch on `device`."""
        return moved(self, device)
