"""One process of the ppo-trainer task: the run on this rank, with the services of the job group."""

import logging
from contextlib import ExitStack

from common.clients.base import wait_healthy
from common.clients.data import DataClient
from common.clients.reward import RewardClient
from common.errors import ServiceError
from common.process import garbage
from common.process import topology as names
from common.process.loop_thread import LoopThread
from common.process.topology import Topology
from common.settings.config import Config
from trainer.backends.job_group import JobGroupBackend
from trainer.build import build_run
from trainer.loop import train
from trainer.rollouts.trial import try_rewards
from trainer.start.rank import started

log = logging.getLogger(__name__)
_SERVICES_START_S = 10.0
"""Patience with services that start before the model is loaded without a trial of the rewards."""


def run(config: Config, topology: Topology) -> None:
    """Trains on this rank until the last step."""
    run_dir = config.trainer.run_dir
    assert run_dir is not None, "`load` sets it"
    with started(config, topology, names.TRAINER) as (ranks, lock), ExitStack() as stack:
        # Other ranks wait for rank 0 when they load the model.
        is_new = not (config.checkpoint.resume and (run_dir / "checkpoints").is_dir())
        rewards_tried = lock is not None and is_new and _try_rewards(config, topology)
        training = build_run(
            config,
            ranks,
            run_dir,
            lock=lock,
            backend=JobGroupBackend(topology, rewards_tried),
            stack=stack,
        )
        garbage.collect_less_often(garbage.OF_TRAINER)
        train(training)
        training.finish()
        ranks.barrier()


def _try_rewards(config: Config, topology: Topology) -> bool:
    """Tries the reward functions before the model is loaded; returns whether that was possible: the
    services may take longer to start. Raises ConfigError for a function that fails.
    """

    async def trial() -> bool:
        services = (
            DataClient(names.DATA, topology.url(names.DATA, config.data.port)),
            RewardClient(names.REWARD, topology.url(names.REWARD, config.reward.port)),
        )
        data, reward = services
        async with data, reward:
            try:
                await wait_healthy(services, _SERVICES_START_S, log.debug)
                (prompt,) = await data.train_prompts(1, 0)
            except ServiceError as error:
                # Said now: to load the model may take minutes.
                log.info("the rewards are not tried before the model is loaded: %s", error)
                return False
            await try_rewards(reward, prompt)
            return True

    with LoopThread() as loop:
        return loop.call(trial())
