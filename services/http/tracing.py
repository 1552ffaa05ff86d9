"""Middleware for request ids, the access log, and request counts and latencies on /metrics."""

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ServiceError, shorten
from common.process import logs, progress
from common.process.metrics import Metrics
from common.wire.attempts import ASKED_ATTEMPT, ATTEMPT, LOST, PROGRESS, WORKING

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
        self._attempts = set[str]()
        """The attempts of clients in progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identifier = _given(scope, logs.REQUEST_HEADER) or logs.new_request_id()
        attempt = _given(scope, ATTEMPT)
        asked = _given(scope, ASKED_ATTEMPT)
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
                        (ASKED_ATTEMPT.encode(), state.encode()),
                        # Those that this service waits for count: the engines of an episode.
                        (PROGRESS.encode(), b"%d" % progress.total(with_others=True)),
                    ]
            await send(message)

        with logs.request(identifier, _given(scope, logs.RUN_HEADER)):
            self._attempts.add(attempt)
            try:
                await self.app(scope, receive, watched)
            finally:
                self._attempts.discard(attempt)
                self._finish(scope, status, time.perf_counter() - start)

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        # Never the raw path: that would be unbounded.
        route = getattr(scope.get("route"), "path", "unknown")
        self._metrics.requests.labels(route, status).inc()
        self._metrics.latency.labels(route).observe(seconds)
        level = self._level_of(scope["method"], route, status)
        if log.isEnabledFor(level):
            error: ServiceError | None = scope.get("error")
            why = f": {' '.join(str(error).split())}" if error else ""
            path = shorten(quote(scope["path"]))  # a line break in it would start a new log line
            log.log(
                level, "%s %s: %d in %.0f ms%s", scope["method"], path, status, 1000 * seconds, why
            )

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


def _given(scope: Scope, header: str) -> str:
    """Returns the id that the client sent, or an empty string when it is missing or unusable."""
    wanted = header.encode()
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
    return values[0] if len(values) == 1 and logs.usable_id(values[0]) else ""
