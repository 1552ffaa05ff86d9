"""Groups that only the replay store has: read from the replay-buffer while it runs, from its file afterwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from common.clients import ReplayClient
from common.errors import NotFound, ServiceError
from common.schemas import Group
from services.replay.buffer import unpack_groups
from services.replay.reading import Archive
from trainer.background import LoopThread

_PATIENCE_S = 3.0
"""How long a page waits for the replay-buffer."""
_WAITING = ("leased", "fresh")


class Replay(Protocol):
    """Read access to a replay store. Thread-safe; calls raise ServiceError or OSError when it cannot be read."""

    def listing(self) -> list[dict[str, Any]] | None:
        """Returns its groups in the form of the replay-buffer's `GET /groups`; None when they have not changed."""

    def group(self, group_id: str) -> Group | None:
        """Returns one group, or None when it is not there."""


class LiveReplay:
    """The replay-buffer of a running run: groups that wait to be trained on; the run directory has all others."""

    def __init__(self, client: ReplayClient, loop: LoopThread) -> None:
        self._client, self._loop = client, loop

    def listing(self) -> list[dict[str, Any]] | None:
        return [row for state in _WAITING for row in self._loop.call(self._client.listing(state, deadline_s=_PATIENCE_S))]

    def group(self, group_id: str) -> Group | None:
        return _found(lambda: self._loop.call(self._client.group(group_id, deadline_s=_PATIENCE_S)))


class StoredReplay:
    """The file of a replay-buffer that does not run; `path` returns None while there is no file."""

    def __init__(self, path: Callable[[], Path | None]) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def listing(self) -> list[dict[str, Any]] | None:
        path = self._path()
        if path is None:
            return []
        status = path.stat()
        if self._seen == (seen := (status.st_mtime_ns, status.st_size)):
            return None
        with Archive(path) as archive:
            rows = archive.listing(-1, 0)
        self._seen = seen
        return rows

    def group(self, group_id: str) -> Group | None:
        path = self._path()
        if path is None:
            return None
        with Archive(path) as archive:
            return _found(lambda: unpack_groups([archive.blob(group_id)])[0])


def reason(error: ServiceError | OSError) -> str:
    """Returns the text of an error of `Replay`."""
    return error.message if isinstance(error, ServiceError) else str(error)


def _found(read: Callable[[], Group]) -> Group | None:
    try:
        return read()
    except ServiceError as error:
        if error.status != NotFound.status:
            raise
        return None
