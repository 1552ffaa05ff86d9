"""Groups that are not trained on, episodes that were lost, and why."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import ServiceError
from common.wire.schemas import Episode, Group

_MAX_REMEMBERED = 1024
"""Maximum number of dropped groups that wait to be logged."""


class GroupFailed(Exception):
    """This group cannot be trained on."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")

    def event(self) -> dict[str, object]:
        """Returns the reason and the `cause`, code and facts of the error behind it."""
        cause = self.__cause__
        known = {"cause": cause.code, **cause.about} if isinstance(cause, ServiceError) else {}
        return {"reason": self.reason, **known}


class DroppedGroup(NamedTuple):
    """A group that is not trained on, and why. It may lack completions, and its rewards may be
    NaN.
    """

    group: Group
    reason: str
    detail: str


@dataclass
class Drops:
    """The groups that were dropped, and what went wrong in the episodes of all groups."""

    counts: Counter[str] = field(default_factory=Counter)
    """Groups dropped since the run began, by reason."""
    in_a_row: int = 0
    """Failures since the last group that succeeded."""
    lost_episodes: Counter[str] = field(default_factory=Counter)
    """Episodes without a reward since the run began, by status."""
    refused_calls: int = 0
    """Calls of the model by episodes that were refused since the run began."""
    refusal: str = ""
    """Why the newest of them was refused."""
    _recent: deque[DroppedGroup] = field(default_factory=lambda: deque(maxlen=_MAX_REMEMBERED))

    def add(self, groups: Sequence[Group], reason: str, detail: str) -> None:
        """Counts groups and remembers them for the log."""
        self.counts[reason] += len(groups)
        self._recent += [DroppedGroup(group, reason, detail) for group in groups]

    def add_episodes(self, episodes: Sequence[Episode]) -> None:
        """Counts the episodes that were lost, and the calls that were refused."""
        for episode in episodes:
            if episode.status != "ok":
                self.lost_episodes[episode.status] += 1
            if episode.refusal:
                self.refused_calls += int(episode.metrics["refused_calls"])
                self.refusal = episode.refusal

    def recent(self) -> list[DroppedGroup]:
        """Returns the groups dropped since the last call."""
        return [self._recent.popleft() for _ in range(len(self._recent))]
