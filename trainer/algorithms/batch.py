"""The training batch, the same on every rank, and the micro-batches cut from it."""

import statistics
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
from learning.routing import RoutedRow, Routers, Routes
from learning.sampling_support import Sampled, Support

Column = list[Float32]
"""One array [L] for each row of a batch."""


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
    """One completion of N tokens with its prompt of P tokens.

    L ≤ N is the number of its trained tokens, which are those not masked.
    """

    prompt_ids: Int32
    """[P]"""
    completion_ids: Int32
    """[N]"""
    mask: Int32 | None
    """[N] 1 for trained tokens of the completion, else 0; None if all are trained."""
    targets: Int32
    """[L] the trained tokens."""
    rollout_logprobs: Float32
    """[L] in nats, under the policy that sampled the completion."""
    episode: int
    """Index of its episode in the batch. The rows of an episode share its reward."""
    reward: float
    weight: float
    """Importance weight of its group."""
    current: bool
    """Whether the policy about to be updated sampled the whole completion."""
    in_loss: bool
    """Whether the loss and its normalisers include it."""
    turns: Sequence[tuple[int, float]] = ()
    """Number of trained tokens and reward of each answer of an episode."""
    sampled: Sampled | None = None
    """The tokens that its tokens were sampled from; None for the whole vocabulary."""
    routed: RoutedRow | None = None
    """The experts that the engine chose; None without routing replay."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def prompt_key(self) -> bytes:
        """Equal for rows that share the computation of their prompt."""
        experts = b"" if self.routed is None else self.routed.prompt.tobytes()
        return self.prompt_ids.tobytes() + experts


@dataclass(slots=True)
class Batch:
    """A training batch, the same on every rank.

    A column has one array [L] for each row, or is None where it was not computed. The training loop
    assigns the columns.

    For example, two groups of two completions with GRPO; the first completion has 3 tokens, the
    others have 2:

        groups        g0              g1
        group_sizes   2               2
        rows          row 0   row 1   row 2   row 3
        reward        1       0       1       1
        targets       [3]     [2]     [2]     [2]          shapes
        advantages    0.7 ×3  −0.7 ×2 0 ×2    0 ×2

    With episodes a row is one of their sequences, so that a group has at least as many rows as
    episodes.
    """

    groups: list[TrainingGroup]
    """The fresh groups first."""
    rows: list[Row]
    """Every completion, group after group."""
    group_sizes: list[int]
    """Number of episodes of each group."""
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

    @property
    def problems(self) -> list[tuple[str, str]]:
        """The prompt and the ground truth of every group."""
        return [(item.group.prompt, item.group.ground_truth) for item in self.groups]

    @property
    def pass_rates(self) -> list[float]:
        """The share of right answers of each group.

        An answer without a verdict counts as right if its reward is above the mean of all of these
        in the batch, which stays so whatever is added to rewards or scales them.
        """
        answers = [item.group.answers for item in self.groups]
        unverified = [answer.reward for own in answers for answer in own if not answer.verified]
        # Without rounding, so that equal rewards are not above their mean.
        bound = statistics.mean(unverified) if unverified else 0.0
        return [
            sum(answer.correct if answer.verified else answer.reward > bound for answer in own)
            / len(own)
            for own in answers
        ]

    @classmethod
    def of(cls, groups: list[TrainingGroup], config: Config, step: int = 0) -> "Batch":
        """Returns the batch of `groups` for the update after `step` steps.

        Raises ConfigError for unequal sizes, except of episodes, of which some may be lost.
        """
        sizes = [len(item.group.answers) for item in groups]
        if len(set(sizes)) != 1 and not config.environment.name:
            raise ConfigError(
                f"the groups of a batch must have the same size, got {sorted(set(sizes))}",
                field="sampling.group_size",
                value=config.sampling.group_size,
                remedy="restore the value with which the replay-buffer was filled, "
                "or empty the replay-buffer with POST /clear",
            )

        rows: list[Row] = []
        teacher_logprobs: Column = []
        first_episode = 0
        for item, size in zip(groups, sizes, strict=True):
            for i, completion in enumerate(item.group.completions):
                # A completion without an episode is one of its own.
                episode = i if completion.episode is None else completion.episode
                rows.append(_row(item, completion, config, first_episode + episode, step=step))
                if not config.teacher.url:
                    continue
                if completion.teacher_logprobs is None:
                    raise _stored_without("teacher.url", config.teacher.url, item.group)
                teacher_logprobs.append(completion.teacher_logprobs)
            first_episode += size
        return cls(groups, rows, sizes, teacher_logprobs=teacher_logprobs or None)

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
        return Sizes.of(
            self.rows,
            shared,
            scored=self.lengths,
            keys=[row.prompt_key for row in self.rows],
        )

    def sequences(self) -> list[TokenSequence]:
        """Returns the sequences for which a critic computes values."""
        return [TokenSequence(row.prompt_ids, row.completion_ids) for row in self.rows]

    def value_targets(self) -> list[ValueTargets]:
        """Returns the critic's training data."""
        assert self.values is not None
        assert self.returns is not None
        return [
            ValueTargets(
                prompt_ids=row.prompt_ids,
                completion_ids=row.completion_ids,
                old_values=values,
                returns=returns,
                weight=row.weight,
            )
            for row, values, returns in zip(self.rows, self.values, self.returns, strict=True)
        ]

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
        policy = np.concatenate(self.start_logprobs())
        teacher = np.concatenate(self.teacher_logprobs)
        return float(np.mean(policy - teacher))

    def mean_advantages(self) -> list[list[float]]:
        """Returns the mean |advantage| of every completion, by group."""
        assert self.advantages is not None
        means = [float(np.abs(advantages).mean()) for advantages in self.advantages]
        return [means[part] for part in self.parts]


def _row(
    item: TrainingGroup, completion: Completion, config: Config, episode: int, *, step: int
) -> Row:
    """Returns the row of a completion; `episode` is its episode's index in the batch."""
    group = item.group
    mask = completion.mask
    trained = np.ones(len(completion.token_ids), np.int32) if mask is None else mask
    turns = [
        (int(trained[turn.start : turn.end].sum()), turn.reward or 0.0) for turn in completion.turns
    ]
    routed: RoutedRow | None = None
    if config.trainer.routing_replay:
        if not len(group.prompt_routed_experts):
            raise _stored_without("trainer.routing_replay", True, group)
        routed = RoutedRow(group.prompt_routed_experts, completion.routed_experts)

    own_prompt = completion.prompt_ids  # of a sequence of an episode
    # Cut at `sampling.max_new_tokens`: its reward says little about what it would have become.
    truncated = completion.finish_reason == "length"
    return Row(
        prompt_ids=group.prompt_token_ids if own_prompt is None else own_prompt,
        completion_ids=completion.token_ids,
        mask=mask,
        targets=completion.trained(completion.token_ids),
        rollout_logprobs=completion.trained(completion.logprobs),
        episode=episode,
        reward=completion.reward,
        weight=item.weight,
        current=completion.weight_version == step,
        in_loss=not (config.algorithm.mask_truncated and truncated),
        turns=turns,
        sampled=Sampled.of(group, completion),
        routed=routed,
    )


def _stored_without(field: str, value: object, group: Group) -> ConfigError:
    """Returns the error for a group that lacks what the setting `field` needs."""
    return ConfigError(
        f"group {group.id} was stored without it",
        field=field,
        value=value,
        remedy="another run stored that group: empty the replay-buffer with POST /clear, or leave "
        "the setting out",
    )


@dataclass(slots=True)
class ModelInputs:
    """Rows as a model scores them; C is the number of their trained tokens."""

    tokens: Layout
    """Prompts and completions, as the model reads them."""
    targets: Tensor
    """[C] the trained completion tokens, int64, row by row."""
    support: Support | None
    """The tokens that each target was sampled from; None for the whole vocabulary."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], layout: type[Layout], routers: Routers | None
    ) -> "ModelInputs":
        """Lays out rows for a model with `layout`, and `routers` if it computes with the experts
        that the engine chose.
        """
        routes: list[Routes] = []
        if routers is not None:
            for row in rows:
                assert row.routed is not None, "`Batch.of` refuses groups without experts"
                routes.append(routers.read(row.routed, row.prompt_ids, row.completion_ids))
        tokens = layout.of(
            [row.prompt_ids for row in rows],
            [row.completion_ids for row in rows],
            [row.mask for row in rows],
            routes,
        )
        targets = np.concatenate([row.targets for row in rows])
        support = Support.of([row.sampled for row in rows], [len(row.targets) for row in rows])
        return cls(tokens, torch.from_numpy(targets).long(), support)


@dataclass(slots=True)
class MicroBatch:
    """Rows of a batch as tensors on one device.

    C is the number of trained completion tokens of all rows, which are concatenated row by row.
    Log-probabilities are in nats, at the sampling temperature.
    """

    inputs: ModelInputs
    rollout_logprobs: Tensor
    """[C] under the policy that sampled the row."""
    old_logprobs: Tensor | None
    """[C] under the policy before the updates on this batch; None if not computed."""
    ref_logprobs: Tensor | None
    """[C] under the reference model; None without one."""
    advantages: Tensor
    """[C]"""
    weights: Tensor
    """[C] importance weight of the token's group."""
    current: Tensor
    """[C] 1 where the policy about to be updated sampled the token, else 0."""
    row_of_token: Tensor
    """[C] the row that each token belongs to, from 0 to `row_count` - 1."""
    lengths: Tensor
    """[C] number of trained completion tokens of that row."""
    row_count: int
    """Number of rows."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        indices: Indices,
        layout: type[Layout],
        device: torch.device,
        *,
        routers: Routers | None = None,
    ) -> "MicroBatch":
        """Returns the rows of `batch` at `indices` as a micro-batch on `device`, for a model with
        `layout` and `routers`.
        """
        numbers = indices.tolist()
        rows = [batch.rows[i] for i in numbers]
        lengths = np.array([len(row.targets) for row in rows])

        def selected(column: Column | None) -> Tensor | None:
            if column is None:
                return None
            return torch.from_numpy(np.concatenate([column[i] for i in numbers]))

        def repeated(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

        advantages = selected(batch.advantages)
        assert advantages is not None
        rollout_logprobs = np.concatenate([row.rollout_logprobs for row in rows])
        micro = cls(
            inputs=ModelInputs.of(rows, layout, routers),
            rollout_logprobs=torch.from_numpy(rollout_logprobs),
            old_logprobs=selected(batch.old_logprobs),
            ref_logprobs=selected(batch.ref_logprobs),
            advantages=advantages,
            weights=repeated([row.weight for row in rows]),
            current=repeated([float(row.current) for row in rows]),
            row_of_token=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
            lengths=torch.from_numpy(np.repeat(lengths, lengths)),
            row_count=len(rows),
        )
        return moved(micro, device)
