"""An algorithm is a row in a table: how it weighs a batch and how the loss is put together. All else is shared.

`AlgorithmSection` in `common.algorithm` holds the settings and the named recipes; this module turns them into tensors.
"""

import numpy as np
import torch
from torch import Tensor

from common.algorithm import AlgorithmSection
from common.schemas import Float32
from learning.batching import split
from trainer.algorithms.advantages import ADVANTAGES, gae, overlong_penalty, whiten
from trainer.algorithms.batch import Batch
from trainer.algorithms.losses import PolicyLoss, cispo, clipped_surrogate, kl_divergence, probability_ratio, sequence_ratio


def weigh(batch: Batch, config: AlgorithmSection, max_new_tokens: int, kl_coef: float) -> None:
    """Sets the batch's advantages and, with a critic, its returns.

    Reads `batch.values` with `gae`, and `batch.old_logprobs` and `batch.reference_logprobs` with the KL in the reward.
    """
    rewards = torch.tensor([row.reward for row in batch.rows], dtype=torch.float32)
    lengths = torch.tensor(batch.lengths)
    if config.overlong_buffer:
        rewards = rewards + overlong_penalty(lengths, max_new_tokens, config.overlong_buffer)
    penalties = _kl_penalties(batch, config, kl_coef)
    if config.advantage == "gae":
        batch.advantages, batch.returns = _token_advantages(batch, rewards, penalties, config)
        return
    if penalties is not None:
        rewards = rewards - torch.tensor([float(penalty.sum()) for penalty in penalties])
    shape = (-1, batch.group_size)
    advantages = ADVANTAGES[config.advantage](rewards.view(shape), lengths.view(shape), config.advantage_eps).flatten()
    batch.advantages = split(advantages.repeat_interleave(lengths).float().numpy(), batch.lengths)


def _kl_penalties(batch: Batch, config: AlgorithmSection, kl_coef: float) -> list[Float32] | None:
    """[L] of each row: what the divergence from the reference takes from the reward of each token."""
    if config.kl_coef == 0 or config.kl_in == "loss":
        return None
    old, reference = (torch.from_numpy(np.concatenate(part)) for part in (batch.old_logprobs, batch.reference_logprobs))
    return split((kl_coef * kl_divergence(old, reference, config.kl_estimator)).numpy(), batch.lengths)


def _token_advantages(
    batch: Batch, rewards: Tensor, penalties: list[Float32] | None, config: AlgorithmSection
) -> tuple[list[Float32], list[Float32]]:
    """GAE of every token; the reward of a completion comes with its last token."""
    width = max(batch.lengths)
    token_rewards, values, mask = (np.zeros((len(batch.rows), width), np.float32) for _ in range(3))
    for i, length in enumerate(batch.lengths):
        if penalties is not None:
            token_rewards[i, :length] = -penalties[i]
        token_rewards[i, length - 1] += float(rewards[i])
        values[i, :length] = batch.values[i]
        mask[i, :length] = 1
    advantages, returns = gae(
        torch.from_numpy(token_rewards), torch.from_numpy(values), torch.from_numpy(mask), config.gamma, config.gae_lambda
    )
    counts = torch.from_numpy(mask) * torch.tensor([[float(row.counts)] for row in batch.rows])
    advantages = whiten(advantages, counts)
    both = (advantages.numpy(), returns.numpy())
    by_row = [[matrix[i, :length] for i, length in enumerate(batch.lengths)] for matrix in both]
    return by_row[0], by_row[1]


def policy_loss(
    config: AlgorithmSection, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Tensor, count: int
) -> PolicyLoss:
    """The loss per token before aggregation.

    Args:
        logprobs: [tokens] of the policy being trained, with gradient.
        old_logprobs: [tokens] of the policy that the ratio is taken to.
        advantages: [tokens]
        rows, count: which of `count` completions each token belongs to.
    """
    if config.importance_level == "sequence":
        ratio = sequence_ratio(logprobs, old_logprobs, rows, count)
    else:
        ratio = probability_ratio(logprobs, old_logprobs)
    if config.policy_loss == "cispo":
        return cispo(ratio, logprobs, advantages, config.clip_low, config.clip_high)
    return clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
