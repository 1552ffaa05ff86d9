"""Computes the advantages of a batch, according to the settings of the algorithm
(`common.settings.algorithm`).
"""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.settings.algorithm import AlgorithmSection
from common.settings.config import Config
from learning.batching import split
from trainer.algorithms.advantages import (
    ADVANTAGES,
    WHITENED,
    gae,
    group_centred,
    length_penalty,
    overlong_penalty,
    reward_normalised,
    whiten,
)
from trainer.algorithms.batch import Batch, Column
from trainer.algorithms.losses import kl_divergence


def compute_advantages(
    batch: Batch, config: Config, kl_coef: float
) -> tuple[Column, Column | None]:
    """Returns the advantages of a batch and, with `gae`, the critic's targets; None without a
    critic.

    Each group compares its episodes, and every sequence of an episode gets the episode's advantage.

    A teacher adds log π_teacher − log π to every token (on-policy distillation, Lu 2025,
    thinkingmachines.ai/blog/on-policy-distillation): minus the reverse KL divergence at that token,
    not normalised.

    Reads `batch.values` with `gae`, and `batch.old_logprobs` and `batch.ref_logprobs` with the KL
    in the reward. `kl_coef` is the current coefficient, which changes with `algorithm.kl_target`.
    """
    algorithm = config.algorithm
    lengths = torch.tensor(batch.lengths)
    turn_rewards = _turn_rewards(batch, config)
    shaping = _shaping(batch, config)  # for single completions only, as are a teacher's scores
    rewards = _episode_rewards(batch, turn_rewards)
    for penalty in shaping:
        rewards = rewards + penalty

    kl_penalties = _kl_penalties(batch, algorithm, kl_coef)
    returns: Tensor | None = None
    if algorithm.advantage == "gae":
        of_rows = rewards[_episode_of_row(batch)]
        advantages, returns = _gae(batch, of_rows, kl_penalties, config=algorithm)
    else:
        if kl_penalties is not None:
            sums = torch.tensor([float(penalty.sum()) for penalty in kl_penalties])
            rewards = rewards - _sum_by_episode(batch, sums)
        advantages = _group_relative(
            batch, config, rewards, turn_rewards=turn_rewards, shaping=shaping
        )

    if algorithm.advantage in WHITENED:
        rows_in_loss = torch.tensor([row.in_loss for row in batch.rows])
        advantages = whiten(advantages, rows_in_loss.repeat_interleave(lengths))

    if batch.teacher_logprobs is not None:
        own = torch.from_numpy(np.concatenate(batch.start_logprobs()))
        teacher = torch.from_numpy(np.concatenate(batch.teacher_logprobs))
        advantages = advantages - config.teacher.coef * kl_divergence(own, teacher, "k1")

    targets = None if returns is None else split(returns.numpy(), batch.lengths)
    return split(advantages.numpy(), batch.lengths), targets


def _episode_of_row(batch: Batch) -> Tensor:
    """Returns [rows] the index of each row's episode."""
    return torch.tensor([row.episode for row in batch.rows])


def _episodes_by_size(batch: Batch) -> list[Tensor]:
    """Returns the indices [groups, n] of the episodes of all groups that have n, for every n."""
    ends = itertools.accumulate(batch.group_sizes)
    by_size: dict[int, list[range]] = {}
    for size, end in zip(batch.group_sizes, ends, strict=True):
        by_size.setdefault(size, []).append(range(end - size, end))
    return [torch.tensor([list(episodes) for episodes in of_size]) for of_size in by_size.values()]


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


def _episode_rewards(batch: Batch, turn_rewards: list[list[float]]) -> Tensor:
    """Returns [episodes] the reward of each, without what its answers are credited with."""
    rewards = [0.0] * len(turn_rewards)
    for row in batch.rows:
        rewards[row.episode] = row.reward - sum(turn_rewards[row.episode])
    return torch.tensor(rewards, dtype=torch.float32)


def _group_relative(
    batch: Batch,
    config: Config,
    rewards: Tensor,
    *,
    turn_rewards: list[list[float]],
    shaping: list[Tensor],
) -> Tensor:
    """Returns advantages [tokens] that compare the `rewards` [episodes] within each group."""
    algorithm = config.algorithm
    row_lengths = torch.tensor(batch.lengths)
    if config.environment.turn_discount is not None:
        return _of_turns(batch, rewards, turn_rewards, config=config)

    advantages = torch.zeros_like(rewards)
    if algorithm.advantage == "reward_normalised":
        components, weights = _components(batch, config, shaping)
        (episodes,) = _episodes_by_size(batch)  # of single completions, which are never lost
        advantages[episodes] = reward_normalised(
            components[:, episodes], weights, algorithm.advantage_eps
        )
    else:
        lengths = _sum_by_episode(batch, row_lengths)
        estimate = ADVANTAGES[algorithm.advantage]
        for episodes in _episodes_by_size(batch):
            advantages[episodes] = estimate(
                rewards[episodes], lengths[episodes], algorithm.advantage_eps
            )
    of_rows = advantages[_episode_of_row(batch)]
    return of_rows.repeat_interleave(row_lengths)


def _of_turns(
    batch: Batch, rewards: Tensor, turn_rewards: list[list[float]], config: Config
) -> Tensor:
    """Returns advantages [tokens] when answers have rewards: `turn_rewards` by episode, not
    included in `rewards` [episodes].

    An episode's reward applies to all its answers and is centred within its group. An answer is
    also credited with H_t = r_t + discount · H_(t+1), its own and later rewards, centred over the
    t-th answers of the group: earlier rewards do not count. With `group_normalised` both are
    divided by √(variance of the rewards + mean square of the centred H).
    """
    discount = config.environment.turn_discount
    assert discount is not None
    outcome = torch.zeros_like(rewards)
    for episodes in _episodes_by_size(batch):
        outcome[episodes] = group_centred(rewards[episodes])
    credits = [_discounted_sums(each, discount) for each in turn_rewards]
    start = 0
    for size in batch.group_sizes:
        own = slice(start, start + size)
        start += size
        group = credits[own]
        _centre_by_turn(group)
        if config.algorithm.advantage == "group_normalised":
            squares = [value**2 for credit in group for value in credit]
            variance = float(outcome[own].var(correction=1)) + sum(squares) / len(squares)
            scale = math.sqrt(variance) + config.algorithm.advantage_eps
            outcome[own] /= scale
            for credit in group:
                credit[:] = [value / scale for value in credit]

    # The answers of an episode may be spread over several rows, in order.
    next_credit = [iter(credit) for credit in credits]
    of_tokens: list[Tensor] = []
    for row in batch.rows:
        for token_count, _ in row.turns:
            of_tokens.append(torch.full((token_count,), next(next_credit[row.episode])))

    of_rows = outcome[_episode_of_row(batch)]
    return of_rows.repeat_interleave(torch.tensor(batch.lengths)) + torch.cat(of_tokens)


def _discounted_sums(rewards: list[float], discount: float) -> list[float]:
    """Returns for each turn the discounted sum of its reward and later ones."""
    sums = [*rewards, 0.0]
    for i in reversed(range(len(rewards))):
        sums[i] += discount * sums[i + 1]
    return sums[:-1]


def _centre_by_turn(group: list[list[float]]) -> None:
    """Subtracts, in place, the mean of the t-th entries of the lists that have one from each."""
    for turn in range(max(map(len, group))):
        reached = [credit for credit in group if len(credit) > turn]
        mean = sum(credit[turn] for credit in reached) / len(reached)
        for credit in reached:
            credit[turn] -= mean


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
    scores: dict[str, list[float]] = {}
    completions = [
        (item.group, completion) for item in batch.groups for completion in item.group.completions
    ]
    for i, (group, completion) in enumerate(completions):
        own = {
            name: score
            for name, score in completion.components.items()
            if score is not None and "/" not in name
        }
        if not own:
            raise ConfigError(
                f"group {group.id} has no scores per reward function, which GDPO needs",
                field="algorithm.advantage",
                value="reward_normalised",
                remedy="use another algorithm.advantage, "
                "or let the reward-server grade every group",
            )
        for name, score in own.items():
            scores.setdefault(name, [math.nan] * len(completions))[i] = score

    weight_by_name = config.reward.weights
    weights = [weight_by_name.get(name, 1.0) for name in scores]
    weights += [1.0] * len(shaping)
    components = [torch.tensor(list(scores.values())), *(penalty[None] for penalty in shaping)]
    return torch.cat(components), torch.tensor(weights)


def _kl_penalties(batch: Batch, config: AlgorithmSection, kl_coef: float) -> Column | None:
    """Returns [L] for each row: the KL penalty β · (log π − log π_ref) to subtract from the reward
    of each token (Ouyang et al. 2022, arXiv:2203.02155); None unless the KL is in the reward.
    """
    if config.kl_coef == 0 or config.kl_in == "loss":
        return None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    old = torch.from_numpy(np.concatenate(batch.old_logprobs))
    reference = torch.from_numpy(np.concatenate(batch.ref_logprobs))
    penalties = kl_coef * kl_divergence(old, reference, "k1")
    return split(penalties.numpy(), batch.lengths)


def _gae(
    batch: Batch, rewards: Tensor, penalties: Column | None, config: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Returns GAE advantages and returns [tokens]; a completion's last token gets its reward.

    Args:
        batch: with the critic's values.
        rewards: [rows]
        penalties: to subtract from the reward of each token; None for none.
        config: with γ and λ.
    """
    assert batch.values is not None
    shape = (len(batch.rows), max(batch.lengths))
    token_rewards = np.zeros(shape, np.float32)
    values = np.zeros(shape, np.float32)
    mask = np.zeros(shape, np.float32)
    for i, length in enumerate(batch.lengths):
        if penalties is not None:
            token_rewards[i, :length] = -penalties[i]
        token_rewards[i, length - 1] += float(rewards[i])
        values[i, :length] = batch.values[i]
        mask[i, :length] = 1

    counts = torch.from_numpy(mask).bool()
    advantages, returns = gae(
        rewards=torch.from_numpy(token_rewards),
        values=torch.from_numpy(values),
        mask=counts,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    return advantages[counts], returns[counts]
