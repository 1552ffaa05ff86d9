"""The training loop, the same on every rank.

    take groups ─► batch ─► update ─► publish ─► release

Rank 0 (`lead`) takes the groups from the replay buffer and shares them; every rank computes its share of the gradient;
rank 0 publishes the weights. One process is a group of one.
"""

from trainer.batch import Batch
from trainer.distributed import Ranks
from trainer.lead import Experience, Lead
from trainer.learner import Learner


def train(learner: Learner, ranks: Ranks, lead: Lead | None, total_steps: int) -> None:
    """Updates until `total_steps`. `lead` is given on rank 0 and None on the others."""
    while learner.step < total_steps:
        experience = Experience.share(lead.take() if lead else None, ranks)
        batch = Batch.of(experience.groups, experience.weights, learner.config, ranks.rank, ranks.world_size)
        if lead is None:
            learner.update(batch)
        else:
            with lead.clock.stage("update"):
                metrics = learner.update(batch)
            lead.finish(experience, metrics)
