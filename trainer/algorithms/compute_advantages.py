"""Computes the advantages of a batch, according to the settings of the algorithm
(`common.settings.algorithm`).
"""

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
    episodes, count = (
        torch.tensor([row.episode for row in batch.rows]),
        len(batch.groups) * batch.group_size,
    )
    rewards, of_rows, shape = (
        torch.zeros(count),
        torch.tensor(batch.lengths),
        (-1, batch.group_size),
    )
    turns = (
        [list[float]() for _ in range(count)]
        if config.environment.turn_discount is not None
        else []
    )
    for row in (
        batch.rows if turns else ()
    ):  # the sequences of an episode, in the order of their calls
        turns[row.episode] += [reward for _, reward in row.turns]
    apart = [sum(each) for each in turns] or [0.0] * count
    rewards[episodes] = torch.tensor(
        [row.reward - apart[row.episode] for row in batch.rows], dtype=torch.float32
    )
    lengths = torch.zeros(count, dtype=torch.int64).index_add(0, episodes, of_rows)
    shaping = _shaping(batch, config)  # for single completions only, as are a teacher's scores
    for part in shaping:
        rewards = rewards + part
    penalties = _kl_penalties(batch, algorithm, kl_coef)
    returns = None
    if algorithm.advantage == "gae":
        advantages, returns = _gae(batch, rewards[episodes], penalties, algorithm)
    else:
        if penalties is not None:
            sums = torch.tensor([float(penalty.sum()) for penalty in penalties])
            rewards = rewards - torch.zeros(count).index_add(0, episodes, sums)
        if turns:
            advantages = _of_turns(batch, rewards.view(shape), turns, config)
        elif algorithm.advantage == "reward_normalised":
            components, weights = _components(batch, config, shaping)
            grouped = reward_normalised(
                components.view(-1, *rewards.view(shape).shape), weights, algorithm.advantage_eps
            )
            advantages = grouped.flatten().float()[episodes].repeat_interleave(of_rows)
        else:
            estimate = ADVANTAGES[algorithm.advantage]
            grouped = estimate(rewards.view(shape), lengths.view(shape), algorithm.advantage_eps)
            advantages = grouped.flatten().float()[episodes].repeat_interleave(of_rows)
    if algorithm.advantage in WHITENED:
        advantages = whiten(
            advantages, torch.tensor([row.counts for row in batch.rows]).repeat_interleave(of_rows)
        )
    if batch.teacher_logprobs is not None:
        own, teacher = (
            torch.from_numpy(np.concatenate(part))
            for part in (batch.start_logprobs(), batch.teacher_logprobs)
        )
        advantages = advantages - config.teacher.coef * kl_divergence(own, teacher, "k1")
    return split(advantages.numpy(), batch.lengths), None if returns is None else split(
        returns.numpy(), batch.lengths
    )


def _of_turns(batch: Batch, rewards: Tensor, turns: list[list[float]], config: Config) -> Tensor:
    """Returns advantages [tokens] when answers have rewards: `turns` by episode, not included in
    `rewards` [groups, n].

    An episode's reward applies to all its answers and is centred within its group. An answer is
    also credited with H_t = r_t + discount · H_(t+1), its own and later rewards, centred over the
    t-th answers of the group: earlier rewards do not count. With `group_normalised` both are
    divided by √(variance of the rewards + mean square of the centred H).
    """
    size, eps = batch.group_size, config.algorithm.advantage_eps
    assert config.environment.turn_discount is not None
    ahead = [_ahead(each, config.environment.turn_discount) for each in turns]
    outcome = group_centred(rewards)
    for number in range(len(batch.groups)):
        group = ahead[number * size : (number + 1) * size]
        for turn in range(max(map(len, group))):
            reached = [each for each in group if len(each) > turn]
            mean = sum(each[turn] for each in reached) / len(reached)
            for each in reached:
                each[turn] -= mean
        if config.algorithm.advantage == "group_normalised":
            squares = [value**2 for each in group for value in each]
            scale = (
                math.sqrt(float(outcome[number].var(correction=1)) + sum(squares) / len(squares))
                + eps
            )
            outcome[number] /= scale
            for each in group:
                each[:] = [value / scale for value in each]
    left = [iter(each) for each in ahead]
    parts = [
        torch.full((count,), next(left[row.episode]))
        for row in batch.rows
        for count, _ in row.turns
    ]
    episodes, of_rows = (
        torch.tensor([row.episode for row in batch.rows]),
        torch.tensor(batch.lengths),
    )
    return outcome.flatten()[episodes].repeat_interleave(of_rows) + torch.cat(parts)


def _ahead(rewards: list[float], discount: float) -> list[float]:
    """Returns for each turn the discounted sum of its reward and later ones."""
    found = [*rewards, 0.0]
    for i in reversed(range(len(rewards))):
        found[i] += discount * found[i + 1]
    return found[:-1]


def _shaping(batch: Batch, config: Config) -> list[Tensor]:
    """Returns [rows] for each penalty that is added to the rewards."""
    algorithm, longest, lengths = (
        config.algorithm,
        config.sampling.max_new_tokens,
        torch.tensor(batch.lengths),
    )
    parts = []
    if algorithm.overlong_buffer:
        parts.append(overlong_penalty(lengths, longest, algorithm.overlong_buffer))
    if algorithm.length_penalty:
        solved = [
            [completion.correct for completion in item.group.completions] for item in batch.groups
        ]
        pass_rates = (
            torch.tensor(solved, dtype=torch.float32)
            .mean(dim=1)
            .repeat_interleave(batch.group_size)
        )
        parts.append(
            algorithm.length_penalty
            * length_penalty(lengths, pass_rates, batch.group_size, longest)
        )
    return parts


def _components(batch: Batch, config: Config, shaping: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the scores [rewards, rows] of every reward function and penalty, and their weights
    [rewards].

    The score is NaN where a function does not apply to a completion. Raises ConfigError for a group
    without scores.
    """
    scores: dict[str, list[float]] = {}
    completions = [completion for item in batch.groups for completion in item.group.completions]
    for i, completion in enumerate(completions):
        own = {
            name: score
            for name, score in completion.components.items()
            if score is not None and "/" not in name
        }
        if not own:
            group = batch.groups[i // batch.group_size].group
            raise ConfigError(
                f"group {group.id} has no scores per reward function, which GDPO needs",
                field="algorithm.advantage",
                value="reward_normalised",
                remedy="use another algorithm.advantage, or let the reward-server grade every group",
            )
        for name, score in own.items():
            scores.setdefault(name, [math.nan] * len(completions))[i] = score
    weights = [config.reward.weights.get(name, 1.0) for name in scores] + [1.0] * len(shaping)
    return torch.cat(
        [torch.tensor(list(scores.values())), *(part[None] for part in shaping)]
    ), torch.tensor(weights)


def _kl_penalties(batch: Batch, config: AlgorithmSection, kl_coef: float) -> Column | None:
    """Returns [L] for each row: the KL penalty to subtract from the reward of each token."""
    if config.kl_coef == 0 or config.kl_in == "loss":
        return None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    old, reference = (
        torch.from_numpy(np.concatenate(part)) for part in (batch.old_logprobs, batch.ref_logprobs)
    )
    return split((kl_coef * kl_divergence(old, reference, "k1")).numpy(), batch.lengths)


def _gae(
    batch: Batch, rewards: Tensor, penalties: Column | None, config: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Returns GAE advantages and returns [tokens]; a completion's last token gets its reward."""
    assert batch.values is not None
    width = max(batch.lengths)
    token_rewards, values, mask = (np.zeros((len(batch.rows), width), np.float32) for _ in range(3))
    for i, length in enumerate(batch.lengths):
        if penalties is not None:
            token_rewards[i, :length] = -penalties[i]
        token_rewards[i, length - 1] += float(rewards[i])
        values[i, :length] = batch.values[i]
        mask[i, :length] = 1
    counts = torch.from_numpy(mask)
    advantages, returns = gae(
        torch.from_numpy(token_rewards),
        torch.from_numpy(values),
        counts,
        config.gamma,
        config.gae_lambda,
    )
    counts = counts.bool()
    return advantages[counts], returns[counts]
