"""Start of a run's rollouts: the number of steps, the services' positions, a trial of the rewards.

The functions run in the event loop of the clients.
"""

import logging

from common.errors import ConfigError
from trainer.rollouts.services import RolloutContext
from trainer.rollouts.trial import try_rewards

log = logging.getLogger(__name__)


async def total_steps(context: RolloutContext, fresh_per_step: int) -> int:
    """Returns the number of steps of the whole run, with `fresh_per_step` new groups in each.
    Raises ConfigError for too little data.
    """
    settings = context.config.trainer
    prompts = await context.services.data.total() * settings.num_epochs
    steps = settings.max_steps or prompts // fresh_per_step
    if steps == 0:
        raise ConfigError(
            f"{prompts} prompts over all epochs are too few for one batch",
            field="trainer.batch_size",
            value=settings.batch_size,
            remedy="lower it, raise trainer.num_epochs, or set trainer.max_steps",
        )
    return steps


async def set_back(
    context: RolloutContext, step: int, position: int, *, known: bool, trained: int
) -> None:
    """Sets the services to the position after `step` steps.

    Args:
        context: the services of the run.
        step: the policy's step.
        position: the position in the prompt stream.
        known: whether the experience in the replay-buffer belongs to this run.
        trained: fresh groups that this run has trained on.

    Raises ConfigError when another run's experience would be reused, or a reward function fails.
    """
    config = context.config
    services = context.services
    reuses = config.replay.reuse_ratio > 0
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
    await services.data.seek(position, f"{context.run_id}-start")
