"""Cancels work when its client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request

from common.errors import NotReady, ServiceError

_T = TypeVar("_T")
_WATCH_S = 0.25
"""Seconds between two looks at whether the service stops."""


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

    async def cancel_after(
        event: Callable[[Request], Awaitable[None]], error: ServiceError
    ) -> None:
        nonlocal reason
        await event(request)
        if reason is None:
            reason = error
            caller.cancel()

    gone = ClientGone("the client closed the connection")
    watchers = [asyncio.create_task(cancel_after(_disconnected, gone))]
    if drain:
        stopping = NotReady("the service is stopping", remedy="try again")
        watchers.append(asyncio.create_task(cancel_after(_draining, stopping)))
    try:
        return await work
    except asyncio.CancelledError:
        # Somebody else may have cancelled the caller, too.
        if reason is None or caller.cancelling() > earlier_cancellations + 1:
            raise
        raise reason from None
    finally:
        for watcher in watchers:
            watcher.cancel()
        if reason is not None:
            caller.uncancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _draining(request: Request) -> None:
    while not request.app.state.draining:  # noqa: ASYNC110
        await asyncio.sleep(_WATCH_S)
