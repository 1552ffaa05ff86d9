"""One step of learning: what a batch does to the models. The training loop calls it, and
`trainer.audit` when it re-executes a step.

    logprobs, values ─► advantages ─► gradient ─► update
"""

import torch

from common.wire.schemas import CriticMetrics
from trainer.algorithms.batch import Batch
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.critic import ValueFunction
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.reference import Reference


def learn(
    policy: Policy, reference: Reference, critic: ValueFunction, batch: Batch
) -> tuple[PolicyUpdate, CriticMetrics | None]:
    """Fills the columns of `batch` and updates the models. A collective; the caller counts the
    step.

    The result depends on nothing but the models, the batch, the settings and the step: randomness,
    such as dropout, is seeded here. Returns the metrics of policy and critic.
    """
    config = policy.config
    torch.manual_seed((policy.seed * 4096 + policy.ranks.rank) % 2**63)

    # None where the algorithm needs none.
    batch.old_logprobs = policy.logprobs(batch)
    batch.ref_logprobs = reference.logprobs(batch)
    batch.values = critic.values(batch)
    batch.advantages, batch.returns = compute_advantages(batch, config, policy.kl_coef)

    # A critic-server learns while the policy is updated here.
    finish_critic_update = critic.start_update(batch, policy.seed)
    warming_up = critic.warming_up(policy.step)
    update = policy.skip_update() if warming_up else policy.update(batch)
    return update, finish_critic_update()
