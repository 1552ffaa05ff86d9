"""Groups that wait in the replay-buffer of a running run; the run directory has all others."""

from typing import Any

from common.clients.replay import ReplayClient
from common.errors import NotFound, ServiceError
from common.process.loop_thread import LoopThread
from common.wire.schemas import Group

_PATIENCE_S = 3.0
"""Time limit of a page's calls to the replay-buffer."""
_WAITING = ("leased", "fresh")


class Replay:
    """The replay-buffer of the run that this process trains. Thread-safe; calls raise ServiceError
    when it does not answer.
    """

    def __init__(self, client: ReplayClient, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop

    def listing(self) -> list[dict[str, Any]]:
        """Returns the waiting groups in the format of the replay-buffer's `GET /groups`."""
        rows = []
        for state in _WAITING:
            rows += self._loop.call(self._client.listing(state, deadline_s=_PATIENCE_S))
        return rows

    def group(self, group_id: str) -> Group | None:
        """Returns one group, or None when it is not in the buffer."""
        try:
            return self._loop.call(self._client.group(group_id, deadline_s=_PATIENCE_S))
        except ServiceError as error:
            if error.status != NotFound.status:
                raise
            return None
