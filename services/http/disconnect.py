"""Work that ends when nobody waits for its result any more."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request

from common.errors import NotReady, ServiceError

_T = TypeVar("_T")
_WATCH_S = 0.25


class ClientGone(ServiceError):
    """The client closed the connection; nobody reads this answer (499)."""

    status = 499
    code = "client_gone"


async def while_wanted(request: Request, work: Awaitable[_T], *, drain: bool = False) -> _T:
    """The result of `work`, which is cancelled when its client closes the connection, and with `drain` when the service stops.

    The body of the request has to be read before. Raises what `work` raises, ClientGone, or NotReady when the service stops.
    """
    task: asyncio.Future[_T] = asyncio.ensure_future(work)
    watchers: list[asyncio.Future[Any]] = [asyncio.ensure_future(_disconnected(request))]
    if drain:
        watchers.append(asyncio.ensure_future(_draining(request)))
    try:
        await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watchers[0].done():
            raise ClientGone("the client closed the connection")
        raise NotReady("the wait was ended: the service is stopping", remedy="try again")
    finally:
        for pending in (task, *watchers):
            pending.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _draining(request: Request) -> None:
    while not request.app.state.draining:  # noqa: ASYNC110 - a signal handler sets it
        await asyncio.sleep(_WATCH_S)
