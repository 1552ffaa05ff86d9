"""Middleware for request ids, the access log, and request counts and latencies on /metrics."""

import asyncio
import logging
import time
from urllib.parse import quote

from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ServiceError, shorten
from common.process import logs, progress
from common.process.metrics import Metrics
from common.wire.headers import ASKED_ATTEMPT, ATTEMPT, LOST, PROGRESS, WORKING

log = logging.getLogger(__name__)
_POLLED = frozenset(
    (
        "/health",
        "/metrics",
        "/stats",
        "/status",
        "/workers",
        "/workers/{name}",
        "/where",
        "/v1/loads",
    )
)
"""Routes that probes, agents and dashboards poll every few seconds: logged at DEBUG."""
_HEADER = logs.REQUEST_HEADER.encode()
_RUN = logs.RUN_HEADER.encode()
_ATTEMPT = ATTEMPT.encode()
_ASKED_ATTEMPT = ASKED_ATTEMPT.encode()
_IDS = frozenset((_HEADER, _RUN, _ATTEMPT, _ASKED_ATTEMPT))
_FAILURES = 10
"""Lines per minute for one route and error status. Further lines are logged at DEBUG, so that
strangers and retrying clients cannot fill the log."""
_WINDOW_S = 60.0


class RequestTracing:
    """Gives every request an id, logs it, and measures it by route.

    A client may send the id, which proves nothing; an unusable id (`common.process.logs.usable_id`)
    is replaced.

    Args:
        metrics: counts requests and their latency.
        level: log level of successful requests.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, level: int) -> None:
        self.app = app
        self._metrics = metrics
        self._level = level
        self._logged = dict[tuple[str, str, int], tuple[float, int]]()
        """By method, route and status: the start of the window, and the lines in it."""
        self._counts = dict[tuple[str, int], tuple[Counter, Histogram]]()
        """By route and status; to look a metric up by its labels takes longer than to count."""
        self._attempts = set[str]()
        """The attempts of clients in progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = _sent_ids(scope)
        identifier = sent.get(_HEADER) or logs.new_request_id()
        attempt = sent.get(_ATTEMPT, "")
        asked = sent.get(_ASKED_ATTEMPT, "")
        status = 500
        start = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, identifier.encode())]
                if asked:
                    state = WORKING if asked in self._attempts else LOST
                    message["headers"] += [
                        (_ASKED_ATTEMPT, state.encode()),
                        # Those that this service waits for count: the engines of an episode.
                        (PROGRESS.encode(), b"%d" % progress.total(with_others=True)),
                    ]
            await send(message)

        with logs.request(identifier, sent.get(_RUN, "")):
            self._attempts.add(attempt)
            try:
                await self.app(scope, receive, watched)
            except asyncio.CancelledError:  # its client in this process has gone
                status = 499
                raise
            finally:
                self._attempts.discard(attempt)
                self._finish(scope, status, time.perf_counter() - start)

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        # Never the raw path: that would be unbounded.
        route = getattr(scope.get("route"), "path", "unknown")
        if (route, status) not in self._counts:
            count = self._metrics.requests.labels(route, status)
            self._counts[route, status] = count, self._metrics.latency.labels(route)
        count, latency = self._counts[route, status]
        count.inc()
        latency.observe(seconds)
        level = self._level_of(scope["method"], route, status)
        if log.isEnabledFor(level):
            error: ServiceError | None = scope.get("error")
            why = f": {' '.join(str(error).split())}" if error else ""
            path = shorten(quote(scope["path"]))  # a line break in it would start a new log line
            code = logs.SERVED if status < 400 else "not_served"
            facts = logs.event(code, status=status, ms=round(1000 * seconds))
            log.log(level, "%s %s%s", scope["method"], path, why, extra=facts)

    def _level_of(self, method: str, route: str, status: int) -> int:
        if status < 400:
            return logging.DEBUG if route in _POLLED else self._level
        if route == "/health" and status == 503:
            return logging.DEBUG
        now = time.monotonic()
        since, lines = self._logged.get((method, route, status), (now, 0))
        if now - since >= _WINDOW_S:
            since = now
            lines = 0
        self._logged[method, route, status] = since, lines + 1
        if lines >= _FAILURES:
            return logging.DEBUG
        # 503 is a start, an end or a queue that is full, and the client tries again.
        has_failed = status >= 500 and status != 503
        return logging.WARNING if has_failed else logging.INFO


def _sent_ids(scope: Scope) -> dict[bytes, str]:
    """Returns the ids that the client sent, by header; an empty text for one that is unusable or
    sent twice.
    """
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in _IDS:
            text = value.decode("latin-1")
            is_usable = name not in found and logs.usable_id(text)
            found[name] = text if is_usable else ""
    return found
