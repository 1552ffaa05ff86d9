"""An algorithm is a row in a table: what it weighs a batch with and how the loss is put together. All else is shared.

`AlgorithmSection` in `common.config` holds the settings and the named recipes; this module turns them into tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.algorithm import AlgorithmSection
from common.schemas import Group
from trainer.advantages import ADVANTAGES, overlong_penalty
from trainer.losses import PolicyLoss, cispo, clipped_surrogate, probability_ratio, sequence_ratio


def weigh(groups: Sequence[Group], config: AlgorithmSection, max_new_tokens: int) -> list[list[float]]:
    """The advantage of every completion, by group.

    Groups of one size are compared in one call; a batch-wide statistic is over all groups and needs one size.
    """
    rewards = torch.stack([torch.from_numpy(group.rewards) for group in groups])
    lengths = torch.tensor([[len(completion.token_ids) for completion in group.completions] for group in groups])
    if config.overlong_buffer:
        rewards = rewards + overlong_penalty(lengths, max_new_tokens, config.overlong_buffer, config.overlong_factor)
    advantages: list[list[float]] = ADVANTAGES[config.advantage](rewards, lengths, config.advantage_eps).tolist()
    return advantages


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
