"""Middleware that decides which requests a service accepts: by token, body size and current
load.
"""

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import NotReady, Overloaded, ServiceError, TooLarge, Unauthorized
from common.process.metrics import Metrics
from common.process.security import accepts, token
from services.http.callers import CallerCheck
from services.http.errors import error_response

log = logging.getLogger(__name__)
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


class Load:
    """Requests and body bytes in progress, their limits, and the number of refused requests."""

    def __init__(self, request_limit: int, body_bytes_limit: int) -> None:
        self.request_limit = request_limit
        self.body_bytes_limit = body_bytes_limit
        self.body_bytes = 0
        self.refused = 0
        self.tasks = set[asyncio.Task[Any]]()
        """The requests in progress."""
        self.ended = set[asyncio.Task[Any]]()

    @property
    def requests(self) -> int:
        return len(self.tasks)

    def stats(self) -> dict[str, int]:
        names = ("request_limit", "body_bytes_limit", "requests", "body_bytes", "refused")
        return {name: getattr(self, name) for name in names}

    def end(self) -> None:
        """Ends every request in progress; those without a response get 503."""
        if self.tasks:
            log.warning(
                "the process is ending: %d requests that wait are answered with 503", self.requests
            )
        self.ended |= self.tasks
        for task in self.tasks:
            task.cancel()


class Admission:
    """Refuses bodies over the limit with 413, and requests over the load limits with 503 and
    Retry-After; answers the requests that `Load.end` ends.

    A body refused for its Content-Length is not kept at all, so refusing is cheap. Without a
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
        task = asyncio.current_task()
        if scope["type"] != "http" or scope["path"] in _NEVER_REFUSED or task is None:
            await self.app(scope, receive, send)
            return
        load = self.load
        # What the client announces counts from now on, so that many large bodies cannot be let in
        # before any of them has arrived. What comes without an announcement counts as it arrives.
        length = dict(scope["headers"]).get(b"content-length", b"")
        held = int(length) if length.isdigit() else 0
        received = 0
        started = False
        refusal = self._refusal(size=held, more=held)
        if refusal is None and load.requests >= load.request_limit:
            refusal = self._overloaded("requests", load.requests, load.request_limit)

        async def counted() -> Message:
            nonlocal held, received, refusal
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                more = max(0, received - held)
                refusal = self._refusal(size=received, more=more)
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

        if refusal is None:
            load.tasks.add(task)
            load.body_bytes += held
            try:
                await self.app(scope, counted, watched)
            except ServiceError as error:
                # Raised in `counted`, and passed through the app: it is answered below.
                if error is not refusal:
                    raise
            except asyncio.CancelledError:
                # `Load.end` cancelled the task to answer it; anyone else wants it to end.
                if task not in load.ended:
                    raise
                task.uncancel()
                refusal = NotReady(
                    "the service is stopping",
                    remedy="try again, as the service may return, or ask another one",
                )
            finally:
                load.tasks.discard(task)
                load.ended.discard(task)
                load.body_bytes -= held
        # A response that has started is cut, so that no client takes a part for the whole.
        if refusal is not None and not started:
            await error_response(refusal, scope)(scope, receive, send)

    def _refusal(self, size: int, more: int) -> ServiceError | None:
        """Returns why a body of `size` bytes, of which `more` are new, is not accepted, or None."""
        load = self.load
        if size > self.max_body_bytes:
            return TooLarge(
                f"the body is over the limit of {self.max_body_bytes} bytes",
                field="body",
                value=size,
                remedy="send smaller batches, or raise max_body_mb where the service has it",
            )
        if more and load.body_bytes + more > load.body_bytes_limit:
            return self._overloaded("body_bytes", load.body_bytes, load.body_bytes_limit)
        return None

    def _overloaded(self, what: str, now: int, limit: int) -> Overloaded:
        """Counts the refusal and returns its error."""
        self.load.refused += 1
        self._metrics.refused.labels(what).inc()
        return Overloaded(
            f"too much at once: {now} {what.replace('_', ' ')} are in progress, the limit is "
            f"{limit}",
            field=what,
            value=now,
            remedy="try again later",
        )
