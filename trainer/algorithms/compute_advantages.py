"""The advantages of a batch, by the settings of the algorithm (`common.algorithm`)."""

import numpy as np
import torch
from torch import Tensor

from common.algorithm import AlgorithmSection
from common.config import Config
from learning.batching import split
from trainer.algorithms.advantages import ADVANTAGES, WHITENED, gae, overlong_penalty, whiten
from trainer.algorithms.batch import Batch, Column
from trainer.algorithms.losses import kl_divergence


def compute_advantages(batch: Batch, config: Config, kl_coef: float) -> tuple[Column, Column | None]:
    """Returns the advantages of a batch and, with `gae`, the critic's targets; None without a critic.

    Reads `batch.values` with `gae`, and `batch.old_logprobs` and `batch.ref_logprobs` with the KL in the reward. `kl_coef` is
    the current one, which changes with `algorithm.kl_target`.
    """
    algorithm = config.algorithm
    rewards = torch.tensor([row.reward for row in batch.rows], dtype=torch.float32)
    lengths = torch.tensor(batch.lengths)
    if algorithm.overlong_buffer:
        rewards = rewards + overlong_penalty(lengths, config.sampling.max_new_tokens, algorithm.overlong_buffer)
    penalties = _kl_penalties(batch, algorithm, kl_coef)
    returns = None
    if algorithm.advantage == "gae":
        advantages, returns = _gae(batch, rewards, penalties, algorithm)
    else:
        if penalties is not None:
            rewards = rewards - torch.tensor([float(penalty.sum()) for penalty in penalties])
        shape = (-1, batch.group_size)
        estimate = ADVANTAGES[algorithm.advantage]
        grouped = estimate(rewards.view(shape), lengths.view(shape), algorithm.advantage_eps)
        advantages = grouped.flatten().float().repeat_interleave(lengths)
    if algorithm.advantage in WHITENED:
        advantages = whiten(advantages, torch.tensor([row.counts for row in batch.rows]).repeat_interleave(lengths))
    return split(advantages.numpy(), batch.lengths), None if returns is None else split(returns.numpy(), batch.lengths)


def _kl_penalties(batch: Batch, config: AlgorithmSection, kl_coef: float) -> Column | None:
    """Returns [L] for each row: the KL penalty to subtract from the reward of each token."""
    if config.kl_coef == 0 or config.kl_in == "loss":
        return None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    old, reference = (torch.from_numpy(np.concatenate(part)) for part in (batch.old_logprobs, batch.ref_logprobs))
    return split((kl_coef * kl_divergence(old, reference, "k1")).numpy(), batch.lengths)


def _gae(batch: Batch, rewards: Tensor, penalties: Column | None, config: AlgorithmSection) -> tuple[Tensor, Tensor]:
    """Returns GAE advantages and returns [tokens]; a completion's reward is that of its last token."""
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
        torch.from_numpy(token_rewards), torch.from_numpy(values), counts, config.gamma, config.gae_lambda
    )
    counts = counts.bool()
    return advantages[counts], returns[counts]
