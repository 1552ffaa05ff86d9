"""The training batch and the micro-batches cut from it.

Every rank knows the facts of all rows (`Row`), and so plans the same passes. The tokens of a row
(`RowTokens`), and what is computed from them, are only on the ranks that compute it, and rank 0.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.process.topology import TRAINER, Topology
from common.settings.config import Config
from common.wire.schemas import Completion, Float32, Group, Int32
from learning.batching import Indices, Sizes
from learning.layout import Layout, moved
from learning.ranks import Ranks
from learning.routing import RoutedRow, Routers, Routes
from learning.sampling_support import Sampled, Support
from trainer.algorithms.spool import Experts, loaded, located

_T = TypeVar("_T")
Column = list[Float32]
"""One array [L] for each row of a batch; an empty one for a row of another rank."""


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group of a training batch."""

    group: Group
    weight: float = 1.0
    """Importance weight of prioritised reuse; 1 for a fresh group."""
    reused: bool = False
    """Whether it was trained on before."""


@dataclass(frozen=True)  # without slots, which would be pickled in Python
class Row:
    """What every rank knows of one completion: all but its tokens."""

    group: str
    """Id of its group."""
    prompt: int
    """Number of its prompt; equal for rows that share the computation of their prompt."""
    prompt_tokens: int
    completion_tokens: int
    trained_tokens: int
    """L, those that are not masked."""
    episode: int
    """Index of its episode in the batch. The rows of an episode share its reward."""
    reward: float
    weight: float
    """Importance weight of its group."""
    current: bool
    """Whether the policy about to be updated sampled the whole completion."""
    in_loss: bool
    """Whether the loss and its normalisers include it."""
    equal: bool = False
    """Whether all rewards of its group are the same."""
    turns: Sequence[tuple[int, float]] = ()
    """Number of trained tokens and reward of each answer of an episode."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """As in `Completion`."""


@dataclass(frozen=True)  # see `Row`
class RowTokens:
    """The tokens of one completion of N tokens with its prompt of P tokens.

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
    sampled: Sampled | None = None
    """The tokens that its tokens were sampled from; None for the whole vocabulary."""
    experts: tuple[Experts, Experts] | None = None
    """The experts that the engine chose for the prompt and for the completion; None without routing
    replay."""
    teacher_logprobs: Float32 | None = None
    """[L] in nats, under the teacher; None without one."""


@dataclass(slots=True)
class Batch:
    """A training batch on one rank.

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
        owners        0       0       1       1            two ranks
        own           0       1                            of the first rank

    With episodes a row is one of their sequences, so that a group has at least as many rows as
    episodes.
    """

    groups: list[TrainingGroup]
    """The fresh groups first; none on ranks above 0."""
    rows: list[Row]
    """Every completion, group after group."""
    tokens: dict[int, RowTokens]
    """By index of the row: of all rows on rank 0, of its own ones on another rank."""
    group_sizes: list[int]
    """Number of episodes of each group."""
    pass_rates: list[float]
    """The share of right answers of each group (`_pass_rates`)."""
    owners: Indices | None = None
    """[rows] the share that computes each row (`assign`); None: this process computes all."""
    own: list[int] = field(default_factory=list)
    """The rows that this rank computes."""
    old_logprobs: Column | None = None
    """Log-probabilities under the policy about to be updated."""
    ref_logprobs: Column | None = None
    """Log-probabilities under the reference model."""
    values: Column | None = None
    """The critic's value of the state before each token."""
    advantages: Column | None = None
    returns: Column | None = None
    """The critic's targets."""

    @property
    def problems(self) -> list[tuple[str, str]]:
        """The prompt and the ground truth of every group."""
        return [(item.group.prompt, item.group.ground_truth) for item in self.groups]

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
        tokens: list[RowTokens] = []
        prompts: dict[bytes, int] = {}
        url = Topology.from_env().url(TRAINER, config.trainer.port)
        first_episode = 0
        for item, size in zip(groups, sizes, strict=True):
            equal = item.group.zero_variance
            for i, completion in enumerate(item.group.completions):
                # A completion without an episode is one of its own.
                episode = i if completion.episode is None else completion.episode
                own_tokens = _tokens(item.group, completion, config, url)
                key = own_tokens.prompt_ids.tobytes()
                if own_tokens.experts is not None:
                    # Another group's prompt was computed with experts of its own.
                    key += item.group.id.encode()
                tokens.append(own_tokens)
                rows.append(
                    _row(
                        item,
                        completion,
                        own_tokens,
                        config,
                        prompt=prompts.setdefault(key, len(prompts)),
                        episode=first_episode + episode,
                        equal=equal,
                        step=step,
                    )
                )
            first_episode += size
        return cls(
            groups=groups,
            rows=rows,
            tokens=dict(enumerate(tokens)),
            group_sizes=sizes,
            pass_rates=_pass_rates(groups),
            own=list(range(len(rows))),
        )

    def assign(self, owners: Indices, share: int) -> None:
        """Sets the share that computes each row, on the rank with this share."""
        self.owners = owners
        self.own = np.flatnonzero(owners == share).tolist()

    @property
    def teacher_logprobs(self) -> Column | None:
        """Log-probabilities of the rows here under the teacher; None without one."""
        found = [row.teacher_logprobs for row in self.tokens.values()]
        return [row for row in found if row is not None] or None

    def gathered(self, column: Sequence[_T], ranks: Ranks) -> list[_T]:
        """Returns a column of the batch with the rows of all ranks on rank 0, and with this rank's
        on the others. A collective.
        """
        found = list(column)
        if self.owners is not None:
            for part in ranks.collect({i: column[i] for i in self.own}):
                for i, row in part.items():
                    found[i] = row
        return found

    @property
    def fresh(self) -> list[Group]:
        """The groups that were generated for this batch."""
        return [item.group for item in self.groups if not item.reused]

    @property
    def lengths(self) -> list[int]:
        """Number of trained completion tokens of each row."""
        return [row.trained_tokens for row in self.rows]

    @property
    def parts(self) -> list[slice]:
        """The slice of rows of each group; on rank 0."""
        ends = np.cumsum([len(item.group.completions) for item in self.groups]).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def sizes(self, shared: bool) -> Sizes:
        """Returns the lengths by which the batch is divided into passes; `shared` says whether rows
        of one prompt share its computation (`Layout.shared`).
        """
        return Sizes(
            prompts=np.array([row.prompt_tokens for row in self.rows]),
            completions=np.array([row.completion_tokens for row in self.rows]),
            groups=np.array([row.prompt for row in self.rows]),
            shared=shared,
            scored=np.array(self.lengths),
            owners=self.owners,
        )

    def start_logprobs(self, rows: Iterable[int]) -> Float32:
        """Returns the log-probabilities of some rows, concatenated, under the policy before the
        update: the trainer's if they were computed, else the engine's.
        """
        old = self.old_logprobs
        return np.concatenate(
            [self.tokens[i].rollout_logprobs if old is None else old[i] for i in rows]
        )

    def teacher_kl(self) -> float | None:
        """Returns the mean of log π − log π_teacher over the tokens, an estimate of KL(π ‖
        teacher); None without a teacher. On rank 0.
        """
        if self.teacher_logprobs is None:
            return None
        policy = self.start_logprobs(range(len(self.rows)))
        teacher = np.concatenate(self.teacher_logprobs)
        return float(np.mean(policy - teacher))

    def mean_advantages(self) -> list[list[float]]:
        """Returns the mean |advantage| of every completion, by group. On rank 0."""
        assert self.advantages is not None
        # All rows at once: numpy takes longer for a call than for the tokens of a row.
        lengths = self.lengths
        row_of_token = np.repeat(range(len(lengths)), lengths)
        means = np.bincount(row_of_token, np.abs(np.concatenate(self.advantages))) / lengths
        return [means[part].tolist() for part in self.parts]


def _pass_rates(groups: Sequence[TrainingGroup]) -> list[float]:
    """Returns the share of right answers of each group.

    An answer without a verdict counts as right if its reward is above the mean reward of all such
    answers in the batch. Adding a constant to the rewards, or scaling them, changes nothing.
    """
    answers = [item.group.answers for item in groups]
    unverified = [answer.reward for own in answers for answer in own if not answer.verified]
    # Without rounding, so that equal rewards are not above their mean.
    bound = statistics.mean(unverified) if unverified else 0.0
    return [
        sum(answer.correct if answer.verified else answer.reward > bound for answer in own)
        / len(own)
        for own in answers
    ]


def _tokens(group: Group, completion: Completion, config: Config, url: str) -> RowTokens:
    """Returns the tokens of a completion; `url` is rank 0's."""
    experts: tuple[Experts, Experts] | None = None
    if config.trainer.routing_replay:
        if not len(group.prompt_routed_experts):
            raise _stored_without("trainer.routing_replay", True, group)
        prompt_experts = located(group.prompt_routed_experts, url)
        experts = (prompt_experts, located(completion.routed_experts, url))
    if config.teacher.url and completion.teacher_logprobs is None:
        raise _stored_without("teacher.url", config.teacher.url, group)
    own_prompt = completion.prompt_ids  # of a sequence of an episode
    return RowTokens(
        prompt_ids=group.prompt_token_ids if own_prompt is None else own_prompt,
        completion_ids=completion.token_ids,
        mask=completion.mask,
        targets=completion.trained(completion.token_ids),
        rollout_logprobs=completion.trained(completion.logprobs),
        sampled=Sampled.of(group, completion),
        experts=experts,
        teacher_logprobs=completion.teacher_logprobs if config.teacher.url else None,
    )


def _row(
    item: TrainingGroup,
    completion: Completion,
    tokens: RowTokens,
    config: Config,
    *,
    prompt: int,
    episode: int,
    equal: bool,
    step: int,
) -> Row:
    """Returns the facts of a completion; `prompt` and `episode` are their indices in the batch."""
    turns: list[tuple[int, float]] = []
    for turn in completion.turns:
        trained = completion.trained_between(turn.start, turn.end)
        turns.append((trained, turn.reward or 0.0))
    # Cut at `sampling.max_new_tokens`: its reward says little about what it would have become.
    truncated = completion.finish_reason == "length"
    return Row(
        group=item.group.id,
        prompt=prompt,
        prompt_tokens=len(tokens.prompt_ids),
        completion_tokens=len(completion.token_ids),
        trained_tokens=len(tokens.targets),
        episode=episode,
        reward=completion.reward,
        weight=item.weight,
        current=completion.weight_version == step,
        in_loss=not (config.algorithm.mask_truncated and truncated),
        equal=equal,
        turns=turns,
        components=completion.components,
    )


def _stored_without(field: str, value: object, group: Group) -> ConfigError:
    """Returns the error for a group that lacks what the setting `field` needs."""
    return ConfigError(
        f"group {group.id} was stored without the data that this setting needs",
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
        cls, rows: Sequence[RowTokens], layout: type[Layout], routers: Routers | None
    ) -> "ModelInputs":
        """Lays out rows for a model with `layout`, and `routers` if it computes with the experts
        that the engine chose.
        """
        routes: list[Routes] = []
        if routers is not None:
            for row in rows:
                assert row.experts is not None, "`Batch.of` refuses groups without experts"
                routed = RoutedRow(*map(loaded, row.experts))
                routes.append(routers.read(routed, row.prompt_ids, row.completion_ids))
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
        tokens = [batch.tokens[i] for i in numbers]
        lengths = np.array([row.trained_tokens for row in rows])

        def selected(column: Column | None) -> Tensor | None:
            if column is None:
                return None
            return torch.from_numpy(np.concatenate([column[i] for i in numbers]))

        def repeated(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

        advantages = selected(batch.advantages)
        assert advantages is not None
        rollout_logprobs = np.concatenate([row.rollout_logprobs for row in tokens])
        micro = cls(
            inputs=ModelInputs.of(tokens, layout, routers),
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
