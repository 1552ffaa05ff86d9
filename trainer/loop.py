"""The training loop, the same on every rank.

    take groups ─► batch ─► scores, values ─► advantages ─► update ─► publish ─► release

Rank 0 (`lead`) takes the groups from the replay buffer and shares them; every rank computes its share of the gradient;
rank 0 publishes the weights. One process is a group of one.
"""

from contextlib import nullcontext

from services.learning.ranks import Ranks
from trainer.algorithms import weigh
from trainer.batch import Batch
from trainer.critic import ValueFunction
from trainer.experience import Experience
from trainer.lead import Lead
from trainer.learner import Learner


def train(learner: Learner, critic: ValueFunction | None, ranks: Ranks, lead: Lead | None, total_steps: int) -> None:
    """Updates until `total_steps`. `lead` is given on rank 0 and None on the others, `critic` where the algorithm has one."""
    config = learner.config
    while learner.step < total_steps:
        experience = Experience.share(lead.take() if lead else None, ranks)
        with lead.clock.stage("update") if lead else nullcontext():
            batch = Batch.of(experience.groups, experience.weights, config, learner.step, experience.fresh)
            learner.score(batch)
            if critic:
                batch.values = critic.values(batch.sequences())
            weigh(batch, config.algorithm, config.sampling.max_new_tokens, learner.kl_coef)
            learned = critic.begin_update(batch.value_targets(), learner.seed) if critic else None
            warming_up = critic is not None and learner.step < config.critic.warmup_steps
            metrics = learner.hold(batch) if warming_up else learner.update(batch)
            critic_metrics = learned() if learned else None
        if lead:
            lead.finish(experience, batch, metrics, critic_metrics)
        else:
            learner.share_weights()
