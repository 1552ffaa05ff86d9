"""What the rollouts of a run use: the clients of its services, its settings, prompter and clock."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.environment import EnvironmentClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.prompts.prompter import Prompter
from common.settings.config import Config
from trainer.rollouts.teacher import Teacher
from trainer.timing import StageClock

log = logging.getLogger(__name__)


@dataclass
class Services:
    """A client for each task, used only in the run's event loop."""

    data: DataClient
    rollout: RolloutClient
    reward: RewardClient
    replay: ReplayClient
    environment: EnvironmentClient | None = None
    """None when the run has no environment: each problem gets single completions."""
    rewards_tried: bool = False
    """Whether the reward functions were tried before the model was loaded."""
    environment_gives_verdicts: bool = False
    """Whether the rewards of the environment say which episodes were right."""
    teacher: Teacher | None = None
    """None without `teacher.url`. It is not one of the run's tasks."""

    def stateful(self) -> list[Client]:
        """Returns the clients of the services that store something."""
        return [self.data, self.reward, self.replay]

    def all(self) -> list[Client]:
        """Returns the clients of all services of the run, the teacher excepted."""
        clients = [*self.stateful(), self.rollout]
        if self.environment is not None:
            clients.append(self.environment)
        return clients


@dataclass(frozen=True)
class RolloutContext:
    """Settings, clients, prompter and clock of a run."""

    config: Config
    services: Services
    prompter: Prompter
    clock: StageClock
    run_id: str
    """Names this attempt; makes the ids of its requests and groups unique."""


async def flush_all(clients: Sequence[Client], deadline_s: float = 60.0) -> None:
    """Flushes all services at once, and logs those that did not answer within `deadline_s` seconds.

    They do not fail the run, since their node may be in the middle of a replacement: the run is
    complete and saved, and everything that services have acknowledged is durable.
    """

    async def flush(client: Client) -> None:
        try:
            await client.flush(deadline_s)
        except ServiceError as error:
            log.warning(
                "%s was not flushed, the end of its log may be missing: %s", client.service, error
            )

    await asyncio.gather(*map(flush, clients))
