"""Computes the advantages of a batch, according to the settings of the algorithm
(`common.settings.algorithm`).
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.errors import ConfigError
from common.settings.algorithm import AlgorithmSection
from common.settings.config import Config
from common.wire.schemas import Float32
from learning.batching import split
from trainer.algorithms.advantages import (
    WHITENED,
    gae,
    group_centred,
    length_penalty,
    named_advantage,
    one_rank,
    overlong_penalty,
    reward_normalised,
    whiten,
)
from trainer.algorithms.batch import Batch, Column
from trainer.algorithms.losses import kl_divergence


def compute_advantages(
    batch: Batch,
    config: Config,
    kl_coef: float,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Column, Column | None]:
    """Returns the advantages of this rank's rows and, with `gae`, the critic's targets; None
    without a critic. A collective.

        rewards [episodes] + penalties for length − KL in the reward ─► advantages [episodes]
            ─► of every token ─► whitened, with some ─► + the teacher's

    Each group compares its episodes, and every sequence of an episode gets the episode's advantage.
    What needs only rewards is computed for all rows on every rank, and what needs tokens for this
    rank's.

    A teacher adds log π_teacher − log π to every token (on-policy distillation, Lu 2025,
    thinkingmachines.ai/blog/on-policy-distillation): minus the reverse KL divergence at that token,
    not normalised.

    Reads `batch.values` with `gae`, and `batch.old_logprobs` and `batch.ref_logprobs` with the KL
    in the reward. `kl_coef` is the current coefficient, which changes with `algorithm.kl_target`.
    """
    algorithm = config.algorithm
    own = torch.tensor(batch.own, dtype=torch.int64)
    own_lengths = torch.tensor(batch.lengths)[own]
    turn_rewards = _turn_rewards(batch, config)
    shaping = _shaping(batch, config)  # for single completions only, as are a teacher's scores
    # All rows of an episode carry its reward. What its answers are credited with is added later.
    outcome_rewards = [0.0] * len(turn_rewards)
    for row in batch.rows:
        outcome_rewards[row.episode] = row.reward - sum(turn_rewards[row.episode])
    rewards = torch.tensor(outcome_rewards, dtype=torch.float32)
    for penalty in shaping:
        rewards = rewards + penalty

    kl_penalties = _kl_penalties(batch, algorithm, kl_coef)
    returns: Tensor | None = None
    if algorithm.advantage == "gae":
        row_rewards = rewards[_episode_of_row(batch)]
        advantages, returns = _gae(batch, row_rewards[own], kl_penalties, algorithm)
    else:
        # Each episode has one reward, from which the penalties of all its tokens are taken.
        if kl_penalties is not None:
            sums = torch.zeros(len(batch.rows))
            sums[own] = torch.tensor([float(penalty.sum()) for penalty in kl_penalties])
            rewards = rewards - _sum_by_episode(batch, sum_over_ranks(sums))
        if config.environment.turn_discount is not None:
            advantages = _turn_advantages(batch, rewards, turn_rewards, config)
        else:
            episode_advantages = _episode_advantages(batch, config, rewards, shaping)
            row_advantages = episode_advantages[_episode_of_row(batch)]
            advantages = row_advantages[own].repeat_interleave(own_lengths)

    if algorithm.advantage in WHITENED:
        # Rows outside the loss would move the mean of those that are trained on.
        rows_in_loss = torch.tensor([row.in_loss for row in batch.rows])
        in_loss = rows_in_loss[own].repeat_interleave(own_lengths)
        advantages = whiten(advantages, in_loss, sum_over_ranks)

    if config.teacher.url and batch.own:
        policy = torch.from_numpy(batch.start_logprobs(batch.own))
        rows = [batch.tokens[i].teacher_logprobs for i in batch.own]
        teacher = torch.from_numpy(np.concatenate([row for row in rows if row is not None]))
        advantages = advantages - config.teacher.coef * kl_divergence(policy, teacher, "k1")

    targets = None if returns is None else _column(batch, returns)
    return _column(batch, advantages), targets


def _flat(batch: Batch, column: Column) -> Float32:
    """Returns a column's values for the tokens of this rank's rows, concatenated."""
    return np.concatenate([np.zeros(0, np.float32), *(column[i] for i in batch.own)])


def _column(batch: Batch, tokens: Tensor) -> Column:
    """Returns the column with these values for the tokens of this rank's rows."""
    found: Column = [np.zeros(0, np.float32)] * len(batch.rows)
    rows = split(tokens.numpy(), [batch.rows[i].trained_tokens for i in batch.own])
    for i, values in zip(batch.own, rows, strict=True):
        found[i] = values
    return found


def _episode_of_row(batch: Batch) -> Tensor:
    """Returns [rows] the index of each row's episode."""
    return torch.tensor([row.episode for row in batch.rows])


def _episodes_of_groups(batch: Batch) -> list[range]:
    """Returns the indices of the episodes of each group."""
    ends = itertools.accumulate(batch.group_sizes)
    return [range(end - size, end) for size, end in zip(batch.group_sizes, ends, strict=True)]


def _sum_by_episode(batch: Batch, values: Tensor) -> Tensor:
    """Returns [episodes] sums of `values` [rows]."""
    sums = torch.zeros(sum(batch.group_sizes), dtype=values.dtype)
    return sums.index_add(0, _episode_of_row(batch), values)


def _turn_rewards(batch: Batch, config: Config) -> list[list[float]]:
    """Returns the rewards of every episode's answers, in order; empty lists if answers are not
    credited on their own (`environment.turn_discount` unset).
    """
    rewards: list[list[float]] = [[] for _ in range(sum(batch.group_sizes))]
    if config.environment.turn_discount is not None:
        for row in batch.rows:  # the sequences of an episode, in the order of their calls
            rewards[row.episode] += [reward for _, reward in row.turns]
    return rewards


def _episode_advantages(
    batch: Batch, config: Config, rewards: Tensor, shaping: list[Tensor]
) -> Tensor:
    """Returns advantages [episodes] that compare the `rewards` [episodes] within each group."""
    algorithm = config.algorithm
    if algorithm.advantage == "reward_normalised":
        components, weights = _components(batch, config, shaping)
        # Single completions, which are never lost: all groups have the same size.
        by_group = components.unflatten(1, (-1, batch.group_sizes[0]))
        return reward_normalised(by_group, weights, algorithm.advantage_eps).flatten()

    advantages = torch.zeros_like(rewards)
    lengths = _sum_by_episode(batch, torch.tensor(batch.lengths))
    estimate = named_advantage(algorithm)
    groups = _episodes_of_groups(batch)
    # Groups of one size are compared in one call. Some may have lost episodes.
    for size in set(batch.group_sizes):
        episodes = torch.tensor([list(group) for group in groups if len(group) == size])
        advantages[episodes] = estimate(rewards[episodes], lengths[episodes], algorithm)
    return advantages


def _turn_advantages(
    batch: Batch, rewards: Tensor, turn_rewards: list[list[float]], config: Config
) -> Tensor:
    """Returns advantages [tokens of this rank] when answers have rewards: `turn_rewards` by
    episode, not included in `rewards` [episodes].

    An episode's reward applies to all its answers and is centred within its group. An answer is
    also credited with H_t = r_t + discount · H_(t+1), its own and later rewards, centred over the
    t-th answers of the group: earlier rewards do not count. With `group_normalised` both are
    divided by √(variance of the rewards + mean square of the centred H).

    For example, two episodes whose answers have the rewards 1, 0 and 0, with discount 1: H is 1, 0
    and 0; the first answers have the mean 0.5 and get 0.5 and −0.5, the second one has no other to
    be compared with and gets 0.
    """
    discount = config.environment.turn_discount
    assert discount is not None
    turns = max(map(len, turn_rewards))
    credits = np.full((len(turn_rewards), turns), np.nan)  # NaN: the episode ended before
    for credit, answers in zip(credits, turn_rewards, strict=True):
        credit[: len(answers)] = answers
    for turn in reversed(range(turns - 1)):
        credits[:, turn] += discount * np.nan_to_num(credits[:, turn + 1])

    outcome = torch.zeros_like(rewards)
    for episodes in _episodes_of_groups(batch):
        own = slice(episodes.start, episodes.stop)
        outcome[own] = group_centred(rewards[own][None])[0]
        group = credits[own]
        reached = ~np.isnan(group)
        group -= np.nansum(group, axis=0) / np.maximum(1, reached.sum(axis=0))
        if config.algorithm.advantage == "group_normalised":
            squares = (group[reached] ** 2).tolist()
            variance = float(outcome[own].var(correction=1)) + sum(squares) / len(squares)
            scale = math.sqrt(variance) + config.algorithm.advantage_eps
            outcome[own] /= scale
            group /= scale

    # The answers of an episode may be spread over several rows, in order.
    next_credit = [iter(credit.tolist()) for credit in credits]
    own_rows = set(batch.own)
    token_advantages: list[Tensor] = [torch.zeros(0)]
    for i, row in enumerate(batch.rows):
        for token_count, _ in row.turns:
            credit = float(outcome[row.episode]) + next(next_credit[row.episode])
            if i in own_rows:
                token_advantages.append(torch.full((token_count,), credit))
    return torch.cat(token_advantages)


def _shaping(batch: Batch, config: Config) -> list[Tensor]:
    """Returns [rows] for each penalty that is added to the rewards."""
    algorithm = config.algorithm
    max_new_tokens = config.sampling.max_new_tokens
    lengths = torch.tensor(batch.lengths)
    penalties: list[Tensor] = []
    if algorithm.overlong_buffer:
        penalties.append(overlong_penalty(lengths, max_new_tokens, algorithm.overlong_buffer))
    if algorithm.length_penalty:
        group_size = batch.group_sizes[0]
        penalty = length_penalty(
            lengths,
            torch.tensor(batch.pass_rates).repeat_interleave(group_size),
            group_size=group_size,
            max_new_tokens=max_new_tokens,
        )
        penalties.append(algorithm.length_penalty * penalty)
    return penalties


def _components(batch: Batch, config: Config, shaping: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the scores [rewards, rows] of every reward function and penalty, and their weights
    [rewards].

    The score is NaN where a function does not apply to a completion. Raises ConfigError for a group
    without scores.
    """
    scored: list[dict[str, float]] = []
    for row in batch.rows:
        own = {
            name: score
            for name, score in row.components.items()
            if score is not None and "/" not in name  # a part of another function's score
        }
        if not own:
            raise ConfigError(
                f"group {row.group} has no scores per reward function, which GDPO needs",
                field="algorithm.advantage",
                value="reward_normalised",
                remedy="use another algorithm.advantage, "
                "or let the reward-server grade every group",
            )
        scored.append(own)

    names = dict.fromkeys(itertools.chain.from_iterable(scored))  # in the order of appearance
    scores = torch.tensor([[own.get(name, math.nan) for own in scored] for name in names])
    weights = [config.reward.weights.get(name, 1.0) for name in names] + [1.0] * len(shaping)
    return torch.cat([scores, *(penalty[None] for penalty in shaping)]), torch.tensor(weights)


def _kl_penalties(batch: Batch, settings: AlgorithmSection, kl_coef: float) -> list[Float32] | None:
    """Returns [L] for each of this rank's rows: the KL penalty β · (log π − log π_ref) to subtract
    from the reward of each token (Ouyang et al. 2022, arXiv:2203.02155); None unless the KL is in
    the reward.
    """
    if settings.kl_coef == 0 or settings.kl_in == "loss":
        return None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    old = torch.from_numpy(_flat(batch, batch.old_logprobs))
    reference = torch.from_numpy(_flat(batch, batch.ref_logprobs))
    penalties = kl_coef * kl_divergence(old, reference, "k1")
    return split(penalties.numpy(), [batch.rows[i].trained_tokens for i in batch.own])


def _gae(
    batch: Batch, rewards: Tensor, penalties: list[Float32] | None, settings: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Returns GAE advantages and returns [tokens of this rank]; a completion's last token gets its
    reward.

    Args:
        batch: with the critic's values.
        rewards: [own rows]
        penalties: to subtract from the reward of each token; None for none.
        settings: with γ and λ.
    """
    assert batch.values is not None
    if not batch.own:
        return torch.zeros(0), torch.zeros(0)
    lengths = torch.tensor([batch.rows[i].trained_tokens for i in batch.own])
    values = _padded([batch.values[i] for i in batch.own])
    token_rewards = torch.zeros_like(values) if penalties is None else -_padded(penalties)
    token_rewards[torch.arange(len(lengths)), lengths - 1] += rewards

    counts = torch.arange(values.shape[1]) < lengths[:, None]
    advantages, returns = gae(
        token_rewards,
        values,
        counts,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
    )
    return advantages[counts], returns[counts]


def _padded(rows: list[Float32]) -> Tensor:
    """Returns [rows, T] the numbers of each row, followed by zeros."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
