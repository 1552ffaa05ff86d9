"""From groups to tensors: the training batch, whole and the same on every rank, and the micro-batches cut from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.errors import ConfigError
from common.schemas import Float32, Group, Int32, TokenSequence, ValueTargets
from learning.batching import Indices, Sizes
from learning.layout import Layout, moved


@dataclass(slots=True)
class Row:
    """One completion with its prompt."""

    prompt_ids: Int32
    completion_ids: Int32
    behaviour_logprobs: Float32
    """[L] under the policy that sampled the completion."""
    reward: float
    weight: float
    """Importance weight of prioritised reuse; 1 for fresh experience."""
    current: bool
    """Whether the policy about to be updated sampled all of it."""
    counts: bool
    """Whether it counts in the loss and its normalisers."""
    corrected: bool
    """False where the policy that sampled is to be taken for the current one."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class Batch:
    """A training batch; columns hold one array [L] for each row and are filled as the step goes on."""

    rows: list[Row]
    """Group after group."""
    group_size: int
    old_logprobs: list[Float32] = field(default_factory=list)
    """Under the policy about to be updated; empty when nothing reads them."""
    first_logprobs: list[Float32 | None] = field(default_factory=list)
    """The same as far as the update computes it anyway, where `old_logprobs` is empty; for people."""
    reference_logprobs: list[Float32] = field(default_factory=list)
    """Empty without a reference model."""
    values: list[Float32] = field(default_factory=list)
    """What the critic expects before each token; empty without a critic."""
    advantages: list[Float32] = field(default_factory=list)
    returns: list[Float32] = field(default_factory=list)
    """What the critic learns; empty without a critic."""

    @classmethod
    def of(
        cls, groups: Sequence[Group], weights: Sequence[float], config: Config, step: int = 0, fresh: int | None = None
    ) -> "Batch":
        """The batch of `groups`, which are of one size; those after the first `fresh` are reused experience.

        With `algorithm.mask_truncated` completions that were cut count nowhere in the loss. Raises ConfigError for
        groups of different sizes.
        """
        sizes = {len(group.completions) for group in groups}
        if len(sizes) != 1:
            raise ConfigError(
                f"the groups of a batch have one size, got {sorted(sizes)}",
                field="sampling.group_size",
                value=config.sampling.group_size,
                remedy="keep it as it was when the replay buffer was filled, or empty that with POST /clear",
            )
        rows = [
            Row(
                group.prompt_token_ids,
                completion.token_ids,
                completion.logprobs,
                completion.reward,
                weight,
                current=completion.weight_version == step,
                counts=not (config.algorithm.mask_truncated and completion.finish_reason == "length"),
                corrected=config.replay.corrected or i < (len(groups) if fresh is None else fresh),
            )
            for i, (group, weight) in enumerate(zip(groups, weights, strict=True))
            for completion in group.completions
        ]
        return cls(rows, sizes.pop())

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each row."""
        return [len(row.completion_ids) for row in self.rows]

    def sizes(self, shared: bool) -> Sizes:
        """What cutting looks at; `shared` of the layout."""
        return Sizes.of([row.prompt_ids for row in self.rows], [row.completion_ids for row in self.rows], shared)

    def sequences(self) -> list[TokenSequence]:
        """What a critic values."""
        return [TokenSequence(row.prompt_ids, row.completion_ids) for row in self.rows]

    def value_targets(self) -> list[ValueTargets]:
        """What a critic learns from."""
        columns = zip(self.rows, self.values, self.returns, strict=True)
        return [
            ValueTargets(row.prompt_ids, row.completion_ids, values, returns, row.weight) for row, values, returns in columns
        ]

    def policy_logprobs(self, row: int) -> Float32 | None:
        """[L] of the policy before it was updated on this batch; None where nothing had to compute it."""
        known: Sequence[Float32 | None] = self.old_logprobs or self.first_logprobs
        return known[row] if known else None

    def mean_advantages(self) -> list[list[float]]:
        """Mean |advantage| of every completion, by group."""
        means = [float(np.abs(advantages).mean()) for advantages in self.advantages]
        return [means[i : i + self.group_size] for i in range(0, len(means), self.group_size)]


@dataclass(slots=True)
class MicroBatch:
    """Rows of a batch as tensors. `C` is the number of completion tokens of all rows together."""

    tokens: Layout
    targets: Tensor
    """[C] the completion tokens, row by row."""
    behaviour_logprobs: Tensor
    """[C]"""
    old_logprobs: Tensor | None
    """[C]"""
    reference_logprobs: Tensor | None
    """[C]"""
    advantages: Tensor
    """[C]"""
    weights: Tensor
    """[C]"""
    current: Tensor
    """[C] 1 where the policy about to be updated sampled."""
    rows: Tensor
    """[C] which row each completion token belongs to."""
    lengths: Tensor
    """[C] completion length of that row."""
    count: int
    """Rows."""

    @classmethod
    def of(cls, batch: Batch, indices: Indices, layout: type[Layout]) -> "MicroBatch":
        """The rows of `batch` at `indices`."""
        rows = [batch.rows[i] for i in indices.tolist()]
        lengths = np.array([len(row.completion_ids) for row in rows])

        def tokens(column: list[Float32]) -> Tensor | None:
            return torch.from_numpy(np.concatenate([column[i] for i in indices.tolist()])) if column else None

        def repeated(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

        advantages = tokens(batch.advantages)
        assert advantages is not None
        return cls(
            tokens=layout.of([row.prompt_ids for row in rows], [row.completion_ids for row in rows]),
            targets=torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64)),
            behaviour_logprobs=torch.from_numpy(np.concatenate([row.behaviour_logprobs for row in rows])),
            old_logprobs=tokens(batch.old_logprobs),
            reference_logprobs=tokens(batch.reference_logprobs),
            advantages=advantages,
            weights=repeated([row.weight for row in rows]),
            current=repeated([float(row.current) for row in rows]),
            rows=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
            lengths=torch.from_numpy(np.repeat(lengths, lengths)),
            count=len(rows),
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return moved(self, device)
