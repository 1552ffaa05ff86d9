"""The clients of one run."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from common.clients import Client, DataClient, ReplayClient, RewardClient
from common.critic_client import CriticClient
from common.errors import ServiceError
from common.rollout_client import RolloutClient

log = logging.getLogger(__name__)


@dataclass
class Services:
    """A client for each task, used only in the run's event loop."""

    data: DataClient
    rollout: RolloutClient
    reward: RewardClient
    replay: ReplayClient
    critic: CriticClient | None = None
    """None where the trainer computes the critic, or there is none."""

    def stateful(self) -> list[Client]:
        """The services that make something durable: all but the router."""
        return [self.data, self.reward, self.replay, *([self.critic] if self.critic else [])]

    def all(self) -> list[Client]:
        return [*self.stateful(), self.rollout]


async def flush_all(clients: Sequence[Client], deadline_s: float = 60.0) -> list[Client]:
    """Flushes all services at once; returns, and logs, those that did not answer within `deadline_s` seconds.

    That is no error: the run is complete and saved, and what services have acknowledged is durable. A node that is just
    being replaced must not turn the run into a failure.
    """
    answers = await asyncio.gather(*(client.flush(deadline_s) for client in clients), return_exceptions=True)
    missing = []
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, ServiceError):
            log.warning("%s was not flushed, the end of its log may be missing: %s", client.service, answer)
            missing.append(client)
        elif isinstance(answer, BaseException):
            raise answer
    return missing
