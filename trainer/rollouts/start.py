"""Start of a run's rollouts: the number of steps, the services' positions, a trial of the
rewards.
"""

import logging
from dataclasses import dataclass

from common.errors import ConfigError, ServiceError
from common.process.logs import SHOWN
from common.settings.rewards import ModelReward
from common.settings.sections import RewardSection
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.requests import GeneratedAnswer, reward_items

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
            dropped = await replay.reset_fresh(position, step)
        else:
            dropped = await replay.reset_fresh()
        if dropped:
            log.info(
                "dropped %d groups of an earlier attempt; their prompts are drawn again", dropped
            )
        if not known and not self.context.config.environment.grades_itself:
            await self._try_rewards()
        await self.context.services.data.seek(position)

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
            extra=SHOWN,
        )

    def _foreign(self, groups: int) -> ConfigError:
        return ConfigError(
            f"the replay-buffer holds {groups} groups of another run, which this run would reuse",
            field="state_dir",
            value=str(self.context.config.state_dir),
            remedy="empty it with POST /clear, give this run its own state_dir, or set "
            "replay.reuse_ratio 0",
        )

    async def _try_rewards(self) -> None:
        """Grades made-up answers to one problem. Raises ConfigError when a reward function fails
        for all of them.

        Otherwise a broken function would fail for every group, long after the start. A missing
        reward without a reason is not the function's fault: a judge cannot be reached, or a sandbox
        is busy. Nor is a problem that no function grades.
        """
        batch = await self.context.services.data.prompts(1, f"{self.context.run_id}-trial")
        prompt = batch.prompts[0]
        answer = GeneratedAnswer(
            prompt.ground_truth or "0", finish_reason="stop", tokens=None, token_ids=[0]
        )
        reward = self.context.services.reward
        items = reward_items(prompt, [answer, answer], reward.gets_tokens)
        try:
            graded = await reward.batch_reward(items)
        except ServiceError as error:
            # It concerns this problem only, whose group will be dropped and counted.
            log.warning("the reward functions could not be tried: %s", error)
            return

        failed = (
            result.reward is None and result.reason and result.status != "inapplicable"
            for result in graded.rewards
        )
        if all(failed):
            raise no_reward(graded.rewards[0].reason, self.context.config.reward)


def no_reward(reason: str, settings: RewardSection) -> ConfigError:
    """Returns the error for reward functions that fail for a first answer; `reason` names function
    and failure.
    """
    if "no answer within" not in reason:
        return ConfigError(
            f"the reward functions gave no reward for a first answer: {reason}",
            field="reward.functions",
            remedy="correct the function, and test it by itself",
        )
    reward_model = settings.function(ModelReward)
    if reason.startswith("reward_model: ") and reward_model is not None:
        return ConfigError(
            reason,
            field="reward.functions.reward_model.max_tokens",
            value=str(reward_model.max_tokens),
            remedy="give the reward-server a GPU or a smaller model, or lower this argument",
        )
    return ConfigError(
        reason,
        field="reward.function_timeout_s",
        value=str(settings.function_timeout_s),
        remedy="make it faster, or raise this setting (in the Python API an item of "
        "TrainerConfig.settings)",
    )
