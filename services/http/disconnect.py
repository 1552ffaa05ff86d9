"""Cancels work when its client disconnects, if client and server are not one process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request

from common.errors import NotReady, ServiceError
from services.http.connections import BoundedConnection, connection_of

_T = TypeVar("_T")


class ClientGone(ServiceError):
    """The client closed the connection, so nobody reads the answer (499)."""

    status = 499
    code = "client_gone"


async def cancel_on_disconnect(request: Request, work: Awaitable[_T], *, drain: bool = False) -> _T:
    """Returns the result of `work`; cancels it when the client disconnects, and with `drain` when
    the service stops.

    The request's body must have been read. Raises the errors of `work`, ClientGone, or NotReady
    when the service stops.
    """
    # The work runs in the caller's task, as one more task would cost as much as a small handler.
    caller = asyncio.current_task()
    assert caller is not None
    earlier_cancellations = caller.cancelling()
    reason: ServiceError | None = None

    def cancel(error: ServiceError) -> None:
        nonlocal reason
        if reason is None:
            reason = error
            caller.cancel()

    connection = connection_of(request.scope)
    watchers: list[asyncio.Handle | asyncio.Task[None]] = []
    if connection is not None:
        watchers += _when_lost(connection, cancel)
    if drain:
        watchers.append(asyncio.create_task(_when_draining(request, cancel)))
    try:
        return await work
    except asyncio.CancelledError:
        # Somebody else may have cancelled the caller, too.
        if reason is None or caller.cancelling() > earlier_cancellations + 1:
            raise
        raise reason from None
    finally:
        if reason is not None:
            caller.uncancel()
        if connection is not None:
            connection.when_lost = None
        for watcher in watchers:
            watcher.cancel()


def _when_lost(
    connection: BoundedConnection, cancel: Callable[[ServiceError], None]
) -> list[asyncio.Handle]:
    def leave() -> None:
        cancel(ClientGone("the client closed the connection"))

    connection.when_lost = leave
    # Not now: what is cancelled must have begun to wait.
    return [asyncio.get_running_loop().call_soon(leave)] if connection.is_lost else []


async def _when_draining(request: Request, cancel: Callable[[ServiceError], None]) -> None:
    await request.app.state.draining.wait()
    cancel(NotReady("the service is stopping", remedy="try again"))
