"""The id of a request on its way through a service: taken over or made, in every line meanwhile, and in the answer."""

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common import logs
from common.errors import ServiceError, shorten

log = logging.getLogger(__name__)
_PASSING = frozenset((404, 429, 503, 507))
"""Not there yet, or not now: clients come again after these, and one line a minute says enough."""
_LINES = 10
"""Lines a minute about requests to one route that were answered with the same error status; the others are counted."""
_WINDOW_S = 60.0
_failure: ContextVar[list[str] | None] = ContextVar("failure", default=None)


def note_failure(error: ServiceError) -> None:
    """The request in work is answered with this error: the log's line about it says so."""
    if (failure := _failure.get()) is not None:
        failure[:] = [" ".join(str(error).split())]


class Traced:
    """Gives every request its id, and logs errors (every request at DEBUG).

    An id that could not be one (`common.logs.usable_id`) is not taken over. It comes from whoever calls and proves nothing.

    Args:
        answered: is told method, route, status and seconds of every request.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[str, str, int, float], None]) -> None:
        self.app, self._answered = app, answered
        self._said: dict[tuple[str, int], tuple[float, int]] = {}  # when the window began, and lines in it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identifier = _given(scope, logs.REQUEST_HEADER) or logs.new_request_id()
        status, start, failure = 500, time.perf_counter(), list[str]()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[logs.REQUEST_HEADER] = identifier
            await send(message)

        scope["request_id"] = identifier  # a crash is answered outside of this
        with logs.request(identifier, _given(scope, logs.RUN_HEADER)):
            before = _failure.set(failure)
            try:
                await self.app(scope, receive, watched)
            finally:
                _failure.reset(before)
                self._tell(scope, status, time.perf_counter() - start, failure)

    def _tell(self, scope: Scope, status: int, seconds: float, failure: list[str]) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        self._answered(scope["method"], route, status, seconds)
        failed = status >= 400 and not (route == "/health" and status == 503)
        level = logging.INFO if failed and self._may_tell(f"{scope['method']} {route}", status) else logging.DEBUG
        if log.isEnabledFor(level):
            why = f": {failure[0]}" if failure else ""
            path = shorten(quote(scope["path"]))  # a line end in it would begin a line of its own
            log.log(level, "%s %s: %d in %.0f ms%s", scope["method"], path, status, 1000 * seconds, why)

    def _may_tell(self, route: str, status: int) -> bool:
        now = time.monotonic()
        since, lines = self._said.get((route, status), (now, 0))
        if now - since >= _WINDOW_S:
            since, lines = now, 0
        self._said[route, status] = since, lines + 1
        return lines < (1 if status in _PASSING else _LINES)


def _given(scope: Scope, header: str) -> str:
    """An id that the client sent; empty when there is none, or none that is usable."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == header.encode()]
    return values[0] if len(values) == 1 and logs.usable_id(values[0]) else ""
