"""Start of a run's rollouts: the number of steps, the services' positions, a trial of the rewards.

The functions run in the event loop of the clients.
"""

import logging

from common.errors import ConfigError
from trainer.rollouts.services import RolloutContext
from trainer.rollouts.trial import try_rewards

log = logging.getLogger(__name__)


async def begin(
    context: RolloutContext, fresh_per_step: int, step: int, position: int, *, known: bool
) -> int:
    """Begins the run at the services, which it sets to the position after `step` steps; returns the
    number of steps of the whole run.

    Args:
        context: the services of the run.
        fresh_per_step: new groups in each step.
        step: the policy's step.
        position: the position in the prompt stream.
        known: whether the experience in the replay-buffer belongs to this run.

    Raises ConfigError for too little data, when another run's experience would be reused, or when a
    reward function fails; ServiceError when another run has begun meanwhile.
    """
    config = context.config
    services = context.services
    reuses = config.replay.reuse_ratio > 0
    data = await services.data.stats()
    prompts = data["total_available"] * config.trainer.num_epochs
    total = config.trainer.max_steps or prompts // fresh_per_step
    if total == 0:
        raise ConfigError(
            f"{prompts} prompts over all epochs are too few for one batch",
            field="trainer.batch_size",
            value=config.trainer.batch_size,
            remedy="lower it, raise trainer.num_epochs, or set trainer.max_steps",
            settings=("trainer.num_epochs", "trainer.max_steps"),
        )
    trained = step * fresh_per_step
    stats = await services.replay.stats()
    if stats["added"] < trained:
        log.warning(
            "warning: the replay-buffer has stored %d groups since it was made, and this run "
            "trained on %d: %s is that of a fork, or was removed or replaced; training "
            "continues%s",
            stats["added"],
            trained,
            config.state_dir / "replay",
            ", and reuse starts with an empty buffer" if reuses else "",
        )
    if reuses and stats["groups"] and not known:
        raise ConfigError(
            f"the replay-buffer holds {stats['groups']} groups of another run, which this run "
            "would reuse",
            field="state_dir",
            value=str(config.state_dir),
            remedy="empty it with POST /clear, give this run its own state_dir, or set "
            "replay.reuse_ratio 0",
        )

    # Steps after the checkpoint are lost: reuse would see their prompts twice, and experience of
    # lost weights.
    if reuses:
        dropped = await services.replay.reset_fresh(position, step, context.run_id)
    else:
        dropped = await services.replay.reset_fresh(run_id=context.run_id)
    if dropped:
        log.info("dropped %d groups of an earlier attempt; their prompts are drawn again", dropped)
    has_ground_truths = not config.environment.grades_itself
    if has_ground_truths and not known and not services.rewards_tried:
        (prompt,) = await services.data.train_prompts(1, 0)
        await try_rewards(services.reward, prompt)
    # The replay-buffer alone decides on the order of runs. So this ends the run that was current
    # before this one began there, and none that has begun since.
    await services.data.seek(position, f"{context.run_id}-start", data["run"])
    return total
