"""The training loop, the same on every rank.

    take groups ─► batch ─► scores, values ─► advantages ─► update ─► publish ─► release

Rank 0 (`lead`) takes the groups from the replay buffer and shares them; every rank computes its share of the gradient;
rank 0 publishes the weights. One process is a group of one.
"""

from contextlib import nullcontext
from pathlib import Path

import torch

from common.watchdog import at
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch
from trainer.algorithms.compute_advantages import weigh
from trainer.lead import Lead
from trainer.policy.checkpoint import Checkpoints, step_of
from trainer.policy.critic import ValueFunction
from trainer.policy.policy import Learner
from trainer.rollouts.experience import Experience


def train(
    learner: Learner,
    critic: ValueFunction | None,
    ranks: Ranks,
    lead: Lead | None,
    total_steps: int,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Updates until `total_steps`. `lead` is given on rank 0 and None on the others, `critic` where the algorithm has one.

    With `checkpoints` it saves every `trainer.checkpoint_every` steps, but not the last. Dropout and the like are functions of
    seed, step and rank. Raises CheckpointFailed when a checkpoint could not be written.
    """
    config, every = learner.config, learner.config.trainer.checkpoint_every
    with checkpoints or nullcontext():
        while learner.step < total_steps:
            if checkpoints:
                checkpoints.check()
            torch.manual_seed((learner.seed * 4096 + ranks.rank) % 2**63)
            at(f"waiting for the batch of step {learner.step + 1}")
            experience = Experience.share(lead.take() if lead else None, ranks)
            at(f"the update of step {learner.step + 1}")
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
            at(f"publishing and recording step {learner.step}")
            if lead:
                lead.finish(experience, batch, metrics, critic_metrics)
            else:
                learner.share_weights()
            # The step's line is there before its checkpoint: a run killed in between would go on after a step without one.
            if checkpoints and every and learner.step % every == 0 and learner.step < total_steps:
                at(f"the checkpoint of step {learner.step}")
                save(checkpoints, learner, critic, lead)


def save(checkpoints: Checkpoints, learner: Learner, critic: ValueFunction | None, lead: Lead | None) -> Path:
    """Begins to write a checkpoint; returns its path. A call of all ranks, which wait for the one before."""
    checkpoints.wait()
    snapshots = learner.snapshots(checkpoints.alone) | (critic.snapshots(checkpoints.alone) if critic else {})
    return checkpoints.save(lead.state() if lead else None, snapshots, learner.step)


def save_last(checkpoints: Checkpoints, learner: Learner, critic: ValueFunction | None, lead: Lead | None) -> Path:
    """The same, written when this returns. One of this step that is there stays: written again it could be lost."""
    newest = checkpoints.newest()
    if newest is not None and step_of(newest) == learner.step:
        return newest
    path = save(checkpoints, learner, critic, lead)
    checkpoints.wait()
    return path
