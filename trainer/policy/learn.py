"""One step of learning: what a batch does to the models. The training loop calls it, and
`trainer.audit` when it re-executes a step.

    logprobs, values ─► advantages ─► gradient ─► update
"""

from dataclasses import replace

import numpy as np
import torch

from trainer.algorithms.batch import Batch, RowTokens, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.critic import CriticMetrics, ValueFunction
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.reference import Reference


def distributed_batch(groups: list[TrainingGroup], policy: Policy) -> Batch:
    """Returns the batch of rank 0's groups: what is known of all rows, and the tokens of this
    rank's. A collective.
    """
    ranks = policy.ranks
    whole = None
    facts = None
    if ranks.is_rank_zero:
        whole = Batch.of(groups, policy.config, policy.step)
        if ranks.world_size == 1:
            return whole
        policy.assign(whole)
        facts = replace(whole, groups=[], tokens={})

    def part(share: int) -> dict[int, RowTokens]:
        assert whole is not None, "rank 0 calls it"
        own = np.flatnonzero(whole.owners == share).tolist()
        # A share without rows takes part in the passes of the others with the first row.
        return {i: whole.tokens[i] for i in own or [0]}

    batch, tokens = ranks.scatter(facts, part)
    if whole is not None:
        return whole  # rank 0 keeps all, for the record
    assert batch is not None, "rank 0 has it"
    assert batch.owners is not None, "rank 0 has assigned the rows"
    batch.assign(batch.owners, ranks.share)
    batch.tokens = tokens
    return batch


def fill_columns(policy: Policy, reference: Reference, critic: ValueFunction, batch: Batch) -> None:
    """Fills the columns of `batch`: what an update needs besides its tokens. A collective."""
    config = policy.config
    ranks = policy.ranks
    # Different for every step and rank; torch takes seeds below 2^63.
    seed = (policy.seed * 4096 + ranks.rank) % 2**63
    # Not `torch.manual_seed`, which keeps a traceback for every kind of GPU that is not there.
    torch.default_generator.manual_seed(seed)
    if ranks.on_gpu:
        torch.cuda.manual_seed_all(seed)

    # None where the algorithm needs none.
    batch.old_logprobs = policy.logprobs(batch)
    batch.ref_logprobs = reference.logprobs(batch)
    batch.values = critic.values(batch)
    batch.advantages, batch.returns = compute_advantages(
        batch, config, policy.kl_coef, ranks.sum_shares
    )


def learn(
    policy: Policy, reference: Reference, critic: ValueFunction, batch: Batch
) -> tuple[PolicyUpdate, CriticMetrics | None]:
    """Fills the columns of `batch` and updates the models. A collective; the caller counts the
    step. Advantages, and log-probabilities if they are recorded, are of all rows on rank 0.

    The result depends on nothing but the models, the batch, the settings and the step: randomness,
    such as dropout, is seeded here. Returns the metrics of policy and critic.
    """
    ranks = policy.ranks
    fill_columns(policy, reference, critic, batch)

    critic_metrics = critic.update(batch, policy.seed)
    warming_up = critic.warming_up(policy.step)
    update = policy.skip_update() if warming_up else policy.update(batch)

    # Rank 0 records all rows: every rank sends what it has of its own, in one message.
    assert batch.advantages is not None, "`fill_columns` computes them"
    logprobs = batch.old_logprobs or update.logprobs or [None] * len(batch.rows)
    own = list(zip(batch.advantages, logprobs, strict=True))
    recorded = batch.gathered(own, ranks)
    batch.advantages = [advantages for advantages, _ in recorded]
    if batch.old_logprobs is not None:
        batch.old_logprobs = [logprobs for _, logprobs in recorded if logprobs is not None]
    elif update.logprobs is not None:
        update = replace(update, logprobs=[logprobs for _, logprobs in recorded])
    return update, critic_metrics
