"""The outcome of an episode, whatever runs it."""

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import InvalidInput, ServiceError, ServiceLost, error_text, shorten
from common.wire.schemas import EpisodeLimits, EpisodeStatus, EpisodeTask, StopReason
from services.environment.session import Session

if TYPE_CHECKING:  # the threads raise this module's errors
    from services.environment.threads import Threads

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """The outcome of an episode."""

    status: EpisodeStatus = "ok"
    stop_reason: StopReason = "done"
    reward: float | None = None
    components: dict[str, float | None] = field(default_factory=dict)
    answer: str = ""
    detail: str = ""
    tool_calls: int = 0
    tool_errors: int = 0
    tool_seconds: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """One reward for every turn; empty when the environment gives none."""


class EpisodeFailed(Exception):
    """The environment or the program raised an error or returned something invalid."""


class EnvironmentLost(Exception):
    """The process, server or machine behind an environment was lost: the episode has no reward and
    is tried again.
    """


class ToolFailed(Exception):
    """A tool call that cannot be made or took longer than `environment.tool_timeout_s`: the model
    is told the text, and the episode goes on.
    """


def timed_out(limit_s: float | None) -> ToolFailed:
    """Returns the error of a tool call that took longer than its limit."""
    return ToolFailed(f"it took longer than {limit_s} s")


class EpisodeRunner(ABC):
    """Runs episodes of one environment."""

    name: str
    tools: dict[str, Any]
    """The functions offered to the model, as far as known before an episode."""
    has_steps = False
    has_reward: bool | None = None
    """Whether episodes give a reward; None: known once an episode gave one."""
    gives_verdicts = False
    """Whether these rewards say which episodes were right."""
    threads: "Threads | None" = None
    """The threads whose calls may hang; None for episodes that run in their own processes."""

    async def run(self, task: EpisodeTask, session: Session, limits: EpisodeLimits) -> Outcome:
        """Plays an episode and returns its outcome.

        This is the one place where the faults of an episode become its status:

            raised                                       status
            TimeoutError: the deadline has passed        timeout
            EnvironmentLost, or no answer of the engines died: it is tried again
            anything else, such as EpisodeFailed         error

        Raises ServiceLost when a server that all episodes need never starts.
        """
        outcome = Outcome()
        try:
            await self._play(task, session, limits, outcome=outcome)
            outcome.stop_reason = session.stop_reason or "done"
        except TimeoutError:
            outcome.status = "timeout"
            outcome.stop_reason = "deadline"
            outcome.detail = (
                f"it took longer than {limits.deadline_s:g} s; its longest call may be stuck"
            )
        except ServiceLost:
            raise
        except EnvironmentLost as error:
            outcome.status = "died"
            outcome.detail = str(error)
        except (EpisodeFailed, InvalidInput) as error:
            outcome.status = "error"
            outcome.detail = str(error)
        except ServiceError as error:
            outcome.status = "died"
            outcome.detail = f"the engines did not answer: {error}"
        except Exception as error:  # a fault in one episode is no fault of the others
            log.exception("an episode of %s failed", self.name)
            outcome.status = "error"
            outcome.detail = error_text(error)
        finally:
            session.close()
        return outcome

    @abstractmethod
    async def _play(
        self, task: EpisodeTask, session: Session, limits: EpisodeLimits, *, outcome: Outcome
    ) -> None:
        """Plays an episode and fills `outcome`, but for its status; raises what `run` records."""

    @abstractmethod
    async def close(self) -> None:
        """Stops whatever keeps running between episodes."""


def parse_reward(reward: Any, where: str) -> tuple[float, dict[str, float | None]]:
    """Returns a reward and its parts. Raises EpisodeFailed unless `reward` is a finite number or a
    mapping of them.
    """
    parts = reward if isinstance(reward, dict) else {"reward": reward}
    try:
        numbers = {str(name): float(value) for name, value in parts.items()}
        if not numbers or not all(map(math.isfinite, numbers.values())):
            raise ValueError
    except Exception:  # of an object of user code
        raise EpisodeFailed(
            f"{where} {shorten(reward)}, not a finite number or a mapping of finite numbers"
        ) from None
    return sum(numbers.values()), dict(numbers)
