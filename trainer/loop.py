"""The training loop, the same on every rank.

    groups ─► batch ─► logprobs, values ─► advantages ─► update ─► push weights ─► free slots

Rank 0 takes the groups from the replay-buffer and sends every rank its rows; every rank computes
their part of the gradient; rank 0 publishes the weights. A process without torchrun is the only
rank, rank 0.
`trainer/run.py` describes the parts of a run, `trainer/rollouts/collector.py` the life of a group.
"""

from common.process import watchdog
from trainer.policy.learn import distributed_batch, learn
from trainer.run import Run


def train(run: Run) -> None:
    """Trains until `run.total_steps`. Raises the error that stops the run, on every rank."""
    policy = run.policy
    critic = run.critic
    rollouts = run.rollouts  # None on ranks above 0

    with run.training():
        while policy.step < run.total_steps:
            run.begin_step()
            batch = distributed_batch(rollouts.next(policy.step) if rollouts else [], policy)

            # The report of a stalled run names this place.
            watchdog.at(f"the update of step {policy.step + 1}")
            with run.lease.training(run.clock):  # the engines sleep if they share the GPUs
                with run.clock.stage("update"):
                    # Log-probabilities, values, advantages, updates.
                    update, critic_metrics = learn(policy, run.reference, critic, batch)
                    policy.step += 1  # the version of the new weights
                    run.reference.refresh(policy)
                    run.trained_prompts.add(batch.problems)
                    if run.audit is not None:
                        run.audit.step(policy, critic, batch, update)

                watchdog.at(f"publishing and recording step {policy.step}")
                if rollouts:
                    rollouts.start_acknowledging(batch)
                weights = run.weights.gather(policy)

            # Waits for the engines only with max_staleness 0; otherwise `served` ends later.
            served = run.weights.publish(weights, policy.step)
            run.evaluate()  # on idle engines with max_staleness 0: no slot is free yet
            if rollouts:
                rollouts.free_slots(batch, when=served)
            run.end_step(batch, update, critic_metrics)
            del batch, update  # the next answers need the memory while `next` waits for them
