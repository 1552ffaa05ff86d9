"""Answers the requests in flight when a service must end."""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import NotReady
from services.http.errors import error_response

log = logging.getLogger(__name__)


class InFlight:
    """The requests in flight."""

    def __init__(self) -> None:
        self.tasks = set[asyncio.Task[None]]()
        self.ended = set[asyncio.Task[None]]()

    def end(self) -> None:
        """Ends every request; requests without a response get 503."""
        if self.tasks:
            log.warning(
                "the process is ending: %d requests that wait are answered with 503",
                len(self.tasks),
            )
        self.ended |= self.tasks
        for task in self.tasks:
            task.cancel()


class DrainMiddleware:
    """Lists requests in `in_flight` while they run, and answers those that it ends."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self.app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        in_flight = self._in_flight
        in_flight.tasks.add(task)
        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if task not in in_flight.ended:
                raise
            task.uncancel()
            # else the connection closes, so that no client takes a partial response for complete
            if not started:
                error = NotReady(
                    "the service is ending",
                    remedy="try again, as the service may return, or ask another one",
                )
                await error_response(error, scope)(scope, receive, send)
        finally:
            in_flight.tasks.discard(task)
            in_flight.ended.discard(task)
