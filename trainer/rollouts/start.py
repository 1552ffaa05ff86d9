"""Start of a run's rollouts: the number of steps, the services' positions, a trial of the
rewards.
"""

import logging
from dataclasses import dataclass

from common.errors import ConfigError
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.trial import try_rewards

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutStart:
    """Checks that a run can collect, and sets the services to the position where it continues.

    All methods run in the event loop of the clients.
    """

    context: RolloutContext
    fresh_per_step: int
    """Number of fresh groups in a batch."""

    async def total_steps(self) -> int:
        """Returns the number of steps of the whole run. Raises ConfigError for too little data."""
        settings = self.context.config.trainer
        prompts = await self.context.services.data.total() * settings.num_epochs
        steps = settings.max_steps or prompts // self.fresh_per_step
        if steps == 0:
            raise ConfigError(
                f"{prompts} prompts over all epochs are too few for one batch",
                field="trainer.batch_size",
                value=settings.batch_size,
                remedy="lower it, raise trainer.num_epochs, or set trainer.max_steps",
            )
        return steps

    async def set_back(self, step: int, position: int, known: bool) -> None:
        """Sets the services to the position after `step` steps.

        Args:
            step: the policy's step.
            position: the position in the prompt stream.
            known: whether the experience in the replay buffer belongs to this run.

        Raises ConfigError when another run's experience would be reused, or a reward function
        fails.
        """
        replay = self.context.services.replay
        reuses = self.context.config.replay.reuse_ratio > 0
        stats = await replay.stats()
        self._warn_of_loss(stats["added"], step * self.fresh_per_step)
        foreign = 0 if known else stats["groups"]
        if reuses and foreign:
            raise self._foreign(foreign)

        # Steps after the checkpoint are lost: reuse would see their prompts twice, and experience
        # of lost weights.
        if reuses:
            dropped = await replay.reset_fresh(position, step, self.context.run_id)
        else:
            dropped = await replay.reset_fresh(run_id=self.context.run_id)
        if dropped:
            log.info(
                "dropped %d groups of an earlier attempt; their prompts are drawn again", dropped
            )
        services = self.context.services
        has_ground_truths = not self.context.config.environment.grades_itself
        if has_ground_truths and not known and not services.rewards_tried:
            (prompt,) = await services.data.train_prompts(1, 0)
            await try_rewards(services.reward, prompt)
        await services.data.seek(position, f"{self.context.run_id}-start")

    def _warn_of_loss(self, added: int, trained: int) -> None:
        """Warns when the replay buffer has stored fewer groups than the run trained on."""
        if added >= trained:
            return
        if self.context.config.replay.reuse_ratio > 0:
            consequence = ", and reuse starts with an empty buffer"
        else:
            consequence = ", and nothing that is still needed is lost"
        log.warning(
            "warning: the replay-buffer has stored %d groups since it was made, and this run "
            "trained on %d: %s was removed or replaced; training continues%s",
            added,
            trained,
            self.context.config.state_dir / "replay",
            consequence,
        )

    def _foreign(self, groups: int) -> ConfigError:
        return ConfigError(
            f"the replay-buffer holds {groups} groups of another run, which this run would reuse",
            field="state_dir",
            value=str(self.context.config.state_dir),
            remedy="empty it with POST /clear, give this run its own state_dir, or set "
            "replay.reuse_ratio 0",
        )
