"""Cancels work when its client disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

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
    task: asyncio.Future[_T] = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    watchers: list[asyncio.Future[Any]] = [disconnected]
    if drain:
        watchers.append(asyncio.ensure_future(_draining(request)))
    try:
        await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if disconnected.done():
            raise ClientGone("the client closed the connection")
        raise NotReady("the service is stopping", remedy="try again")
    finally:
        for pending in (task, *watchers):
            pending.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _draining(request: Request) -> None:
    while not request.app.state.draining:  # noqa: ASYNC110
        await asyncio.sleep(_WATCH_S)
