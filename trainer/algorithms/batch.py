"""The training batch, the same on every rank, and the micro-batches cut from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Completion, Float32, Group, Int32, TokenSequence, ValueTargets
from learning.batching import Indices, Sizes
from learning.layout import Layout, moved
from learning.support import Sampled, Support

Column = list[Float32]


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group of a training batch."""

    group: Group
    weight: float = 1.0
    """Importance weight of prioritised reuse; 1 for a fresh group."""
    reused: bool = False
    """Whether it was trained on before."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion with its prompt. L is the number of its trained tokens, which are those not
    masked.
    """

    prompt_ids: Int32
    completion_ids: Int32
    mask: Int32 | None
    """1 for trained tokens of the completion, else 0; None if all are trained."""
    targets: Int32
    """[L] the trained tokens."""
    rollout_logprobs: Float32
    """[L] under the policy that sampled the completion."""
    episode: int
    """Index of its episode in the batch. The rows of an episode share its reward."""
    reward: float
    weight: float
    """Importance weight of its group."""
    current: bool
    """Whether the policy about to be updated sampled the whole completion."""
    counts: bool
    """Whether it counts in the loss and its normalisers."""
    corrected: bool
    """False for a reused row that counts as sampled by the policy about to be updated
    (`replay.corrected` false)."""
    turns: Sequence[tuple[int, float]] = ()
    """Number of trained tokens and reward of each answer of an episode."""
    sampled: Sampled | None = None
    """The tokens that its tokens were sampled from; None for the whole vocabulary."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class Batch:
    """A training batch, the same on every rank.

    A column has one array [L] for each row, or is None where it was not computed. The training loop
    assigns the columns.
    """

    groups: list[TrainingGroup]
    """The fresh groups first."""
    rows: list[Row]
    """Every completion, group after group."""
    group_size: int
    """Number of episodes in a group."""
    old_logprobs: Column | None = None
    """Log-probabilities under the policy about to be updated."""
    ref_logprobs: Column | None = None
    """Log-probabilities under the reference model."""
    values: Column | None = None
    """The critic's value of the state before each token."""
    teacher_logprobs: Column | None = None
    """Log-probabilities under the teacher."""
    advantages: Column | None = None
    returns: Column | None = None
    """The critic's targets."""

    @classmethod
    def of(cls, groups: list[TrainingGroup], config: Config, step: int = 0) -> "Batch":
        """Returns the batch of `groups` for the update after `step` steps. Raises ConfigError for
        unequal sizes.
        """
        sizes = {len(item.group.answers) for item in groups}
        if len(sizes) != 1:
            raise ConfigError(
                f"the groups of a batch must have the same size, got {sorted(sizes)}",
                field="sampling.group_size",
                value=config.sampling.group_size,
                remedy="restore the value with which the replay-buffer was filled, or empty the replay-buffer with POST /clear",
            )
        size = sizes.pop()
        rows = [
            Row(
                item.group.prompt_token_ids
                if completion.prompt_ids is None
                else completion.prompt_ids,
                completion.token_ids,
                completion.mask,
                completion.trained(completion.token_ids),
                completion.trained(completion.logprobs),
                number * size + (i if completion.episode is None else completion.episode),
                completion.reward,
                item.weight,
                current=completion.weight_version == step,
                counts=not (
                    config.algorithm.mask_truncated and completion.finish_reason == "length"
                ),
                corrected=config.replay.corrected or not item.reused,
                turns=_turns(completion),
                sampled=Sampled.of(item.group, completion),
            )
            for number, item in enumerate(groups)
            for i, completion in enumerate(item.group.completions)
        ]
        batch = cls(groups, rows, size)
        if config.teacher.url:
            batch.teacher_logprobs = [
                _taught(config, item.group, each)
                for item in groups
                for each in item.group.completions
            ]
        return batch

    @property
    def fresh(self) -> list[Group]:
        """The groups that were generated for this batch."""
        return [item.group for item in self.groups if not item.reused]

    @property
    def lengths(self) -> list[int]:
        """Number of trained completion tokens of each row."""
        return [len(row.targets) for row in self.rows]

    @property
    def parts(self) -> list[slice]:
        """The slice of rows of each group."""
        ends = np.cumsum([len(item.group.completions) for item in self.groups]).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def sizes(self, shared: bool) -> Sizes:
        """Returns the sizes by which the batch is cut; `shared` is the layout's."""
        prompts, completions = (
            [row.prompt_ids for row in self.rows],
            [row.completion_ids for row in self.rows],
        )
        return Sizes.of(prompts, completions, shared, self.lengths)

    def sequences(self) -> list[TokenSequence]:
        """Returns the sequences for which a critic computes values."""
        return [TokenSequence(row.prompt_ids, row.completion_ids) for row in self.rows]

    def value_targets(self) -> list[ValueTargets]:
        """Returns the critic's training data."""
        assert self.values is not None
        assert self.returns is not None
        rows = zip(self.rows, self.values, self.returns, strict=True)
        return [
            ValueTargets(row.prompt_ids, row.completion_ids, values, targets, row.weight)
            for row, values, targets in rows
        ]

    def rollout_logprobs(self, row: int) -> Float32:
        """Returns [L] under the policy that sampled the row, or is treated as if it did
        (`Row.corrected`).
        """
        if self.rows[row].corrected:
            return self.rows[row].rollout_logprobs
        assert self.old_logprobs is not None
        return self.old_logprobs[row]

    def start_logprobs(self) -> Column:
        """Returns [L] for each row under the policy before the update: the trainer's if computed,
        else the engine's.
        """
        return self.old_logprobs or [row.rollout_logprobs for row in self.rows]

    def teacher_kl(self) -> float | None:
        """Returns the mean of log π − log π_teacher over the tokens, an estimate of KL(π ‖
        teacher); None without a teacher.
        """
        if self.teacher_logprobs is None:
            return None
        return float(
            np.mean(np.concatenate(self.start_logprobs()) - np.concatenate(self.teacher_logprobs))
        )

    def mean_advantages(self) -> list[list[float]]:
        """Returns the mean |advantage| of every completion, by group."""
        assert self.advantages is not None
        means = [float(np.abs(advantages).mean()) for advantages in self.advantages]
        return [means[part] for part in self.parts]


def lay_out(layout: type[Layout], rows: Sequence[Row]) -> Layout:
    """Returns rows in a model's layout; their trained tokens are scored."""
    return layout.of(
        [row.prompt_ids for row in rows],
        [row.completion_ids for row in rows],
        [row.mask for row in rows],
    )


def _turns(completion: Completion) -> list[tuple[int, float]]:
    """Returns the number of trained tokens and the reward of each answer of an episode."""
    marks = (
        np.ones(len(completion.token_ids), np.int32) if completion.mask is None else completion.mask
    )
    return [
        (int(marks[turn.start : turn.end].sum()), turn.reward or 0.0) for turn in completion.turns
    ]


def _taught(config: Config, group: Group, completion: Completion) -> Float32:
    """Returns the teacher's scores of a completion. Raises ConfigError when there are none."""
    if completion.teacher_logprobs is None:
        raise ConfigError(
            f"group {group.id} has no scores from a teacher",
            field="teacher.url",
            value=config.teacher.url,
            remedy="a run without a teacher stored it: empty the replay-buffer with POST /clear, or leave the setting out",
        )
    return completion.teacher_logprobs


@dataclass(slots=True)
class MicroBatch:
    """Rows of a batch as tensors [C], where C is the total number of trained completion tokens."""

    tokens: Layout
    targets: Tensor
    """The trained completion tokens, row by row."""
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
    """Number of trained completion tokens of that row."""
    support: Support | None
    """The tokens that each target was sampled from; None for the whole vocabulary."""
    count: int
    """Number of rows."""

    @classmethod
    def of(
        cls, batch: Batch, indices: Indices, layout: type[Layout], device: torch.device
    ) -> "MicroBatch":
        """Returns the rows of `batch` at `indices` as a micro-batch on `device`."""
        rows = [batch.rows[i] for i in indices.tolist()]
        lengths = np.array([len(row.targets) for row in rows])

        def tokens(column: Column | None) -> Tensor | None:
            return (
                None
                if column is None
                else torch.from_numpy(np.concatenate([column[i] for i in indices.tolist()]))
            )

        def repeated(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

        advantages = tokens(batch.advantages)
        assert advantages is not None
        micro = cls(
            tokens=lay_out(layout, rows),
            targets=torch.from_numpy(
                np.concatenate([row.targets for row in rows]).astype(np.int64)
            ),
            rollout_logprobs=torch.from_numpy(
                np.concatenate([batch.rollout_logprobs(i) for i in indices.tolist()])
            ),
            old_logprobs=tokens(batch.old_logprobs),
            ref_logprobs=tokens(batch.ref_logprobs),
            advantages=advantages,
            weights=repeated([row.weight for row in rows]),
            current=repeated([float(row.current) for row in rows]),
            rows=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
            lengths=torch.from_numpy(np.repeat(lengths, lengths)),
            support=Support.of([row.sampled for row in rows], lengths.tolist()),
            count=len(rows),
        )
        return moved(micro, device)
