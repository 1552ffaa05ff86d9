"""Middleware that decides which requests a service accepts: by token, body size and current
load.
"""

from dataclasses import asdict, dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import Overloaded, ServiceError, TooLarge, Unauthorized
from common.process.metrics import Metrics
from common.process.security import accepts, token
from services.http.callers import CallerCheck
from services.http.errors import error_response

BODIES_AT_ONCE = 4
"""How many bodies of the largest permitted size may be in progress at once."""
_NEVER_REFUSED = frozenset(("/health", "/metrics"))


class CallerAuth:
    """Refuses requests without the run's token with 401, before their bodies are read.

    Without a token in the run, it refuses requests that a web page could have sent
    (`services.http.callers`).

    `/health` answers without credentials, since probes have none; `scope["known"]` says whether it
    may give details. `open_paths` also need none: they are files of a page that asks for the token
    itself. Paths below `keyed_path` have their own keys, which the app checks.
    """

    def __init__(
        self, app: ASGIApp, open_paths: frozenset[str] = frozenset(), keyed_path: str = ""
    ) -> None:
        self.app = app
        self._token = token()
        self._open = open_paths | {"/health"}
        self._keyed = keyed_path
        self._check = CallerCheck(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        refusal = self._check.refusal(scope) if self._token is None and is_http else None

        # True: the token is right, or none is needed. False: it is wrong. None: it is missing.
        known: bool | None = True
        if self._token is not None and scope["type"] != "lifespan":
            known = accepts(self._token, scope["headers"])
        scope["known"] = known

        is_open = scope.get("method") == "GET" and scope["path"] in self._open
        is_keyed = bool(self._keyed) and is_http and scope["path"].startswith(self._keyed)
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, send)
        elif known or (known is None and is_open) or is_keyed:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = Unauthorized(
                "the token is wrong" if known is False else "a token is needed",
                remedy="send `Authorization: Bearer …` with the API_TOKEN that this service was "
                "started with",
            )
            await error_response(error, scope)(scope, receive, send)


@dataclass
class Load:
    """Requests and body bytes in progress, their limits, and the number of refused requests."""

    request_limit: int
    body_bytes_limit: int
    requests: int = field(default=0, init=False)
    body_bytes: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)

    def stats(self) -> dict[str, int]:
        return asdict(self)


class Admission:
    """Refuses bodies over the limit with 413, and requests over the load limits with 503 and
    Retry-After.

    A body refused for its Content-Length is not read at all, so refusing is cheap. Without a
    Content-Length a body is counted as it streams in. `/health` and `/metrics` are never refused.

    Args:
        load: holds the counts.
        max_body_bytes: limit of one request.
        metrics: shows counts and limits.
    """

    def __init__(self, app: ASGIApp, load: Load, max_body_bytes: int, metrics: Metrics) -> None:
        self.app = app
        self.load = load
        self.max_body_bytes = max_body_bytes
        self._metrics = metrics
        metrics.in_progress.set_function(lambda: load.requests)
        metrics.in_progress_limit.set(load.request_limit)
        metrics.bodies.set_function(lambda: load.body_bytes)
        metrics.bodies_limit.set(load.body_bytes_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _NEVER_REFUSED:
            await self.app(scope, receive, send)
            return
        load = self.load
        length = dict(scope["headers"]).get(b"content-length", b"")
        held = int(length) if length.isdigit() else 0
        received = 0
        started = False
        refusal = self._too_large(held) or self._too_many() or self._too_many_bytes(held)
        if refusal:
            await error_response(refusal, scope)(scope, receive, send)
            return
        load.requests += 1
        load.body_bytes += held

        async def counted() -> Message:
            nonlocal held, received, refusal
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                more = max(0, received - held)
                refusal = self._too_large(received) or self._too_many_bytes(more)
                if refusal:
                    raise refusal
                held += more
                load.body_bytes += more
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            # Otherwise the framework is answering the error raised in `counted`.
            if refusal is None:
                started = True
                await send(message)

        try:
            await self.app(scope, counted, watched)
        except ServiceError as error:
            if error is not refusal:
                raise
        finally:
            load.requests -= 1
            load.body_bytes -= held
        if refusal is not None and not started:
            await error_response(refusal, scope)(scope, receive, send)

    def _too_large(self, size: int) -> ServiceError | None:
        if size <= self.max_body_bytes:
            return None
        return TooLarge(
            f"the body is over the limit of {self.max_body_bytes} bytes",
            field="body",
            value=size,
            remedy="send smaller batches, or raise max_body_mb",
        )

    def _too_many(self) -> ServiceError | None:
        load = self.load
        if load.requests < load.request_limit:
            return None
        return self._overloaded("requests", load.requests, load.request_limit)

    def _too_many_bytes(self, more: int) -> ServiceError | None:
        now = self.load.body_bytes
        limit = self.load.body_bytes_limit
        if not more or now + more <= limit:
            return None
        return self._overloaded("body_bytes", now, limit, remedy=", or raise max_body_mb")

    def _overloaded(self, what: str, now: int, limit: int, remedy: str = "") -> Overloaded:
        """Counts the refusal and returns its error."""
        self.load.refused += 1
        self._metrics.refused.labels(what).inc()
        reason = (
            f"too much at once: {now} {what.replace('_', ' ')} are in progress, the limit is "
            f"{limit}"
        )
        return Overloaded(reason, field=what, value=now, remedy=f"try again later{remedy}")
