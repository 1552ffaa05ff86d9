"""What a service takes on at a time: so many requests and so many bytes of their bodies. Beyond it, 503 with Retry-After.

A request is refused by its head alone: nothing of its body is read, so refusing costs next to nothing, however many come.
"""

from dataclasses import asdict, dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import Overloaded, ServiceError, TooLarge
from common.observe import Metrics
from services.http.errors import error_response

BODIES_AT_ONCE = 4
"""So many of the largest bodies may be in work at once."""
_NEVER_REFUSED = frozenset(("/health", "/metrics"))


@dataclass
class Load:
    """Requests and bytes of bodies in work now, their limits, and how many requests were refused."""

    request_limit: int
    body_bytes_limit: int
    requests: int = field(default=0, init=False)
    body_bytes: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)

    def stats(self) -> dict[str, int]:
        return asdict(self)


class Admission:
    """Refuses bodies over the limit with 413, and what is too much at a time with 503, `/health` and `/metrics` excepted.

    A body counts by its Content-Length, or as it streams in, until its request is answered.

    Args:
        load: gets the counts.
        max_body_bytes: of one request.
        metrics: get counts and limits.
    """

    def __init__(self, app: ASGIApp, load: Load, max_body_bytes: int, metrics: Metrics) -> None:
        self.app, self.load, self.max_body_bytes, self._metrics = app, load, max_body_bytes, metrics
        metrics.in_progress.set_function(lambda: load.requests)
        metrics.in_progress_limit.set(load.request_limit)
        metrics.bodies.set_function(lambda: load.body_bytes)
        metrics.bodies_limit.set(load.body_bytes_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _NEVER_REFUSED:
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        body = _Body(self, receive, int(length) if length.isdigit() else 0)
        try:
            body.admit()
        except ServiceError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if body.error is None:  # else the framework is answering something to the error raised in `receive`
                started = True
                await send(message)

        try:
            await self.app(scope, body.receive, watched)
        except ServiceError as error:
            if error is not body.error:
                raise
        finally:
            body.leave()
        if body.error is not None and not started:
            await error_response(body.error, scope)(scope, receive, send)

    def too_large(self, size: int) -> TooLarge:
        return TooLarge(
            f"the body is over the limit of {self.max_body_bytes} bytes",
            field="body",
            value=size,
            remedy="send smaller batches, or raise max_body_mb",
        )

    def overloaded(self, what: str, now: int, limit: int, setting: str = "") -> Overloaded:
        """The error, counted."""
        self.load.refused += 1
        self._metrics.refused.labels(what).inc()
        return Overloaded(
            f"too much at a time: {now} {what.replace('_', ' ')} are in work, the limit is {limit}",
            field=what,
            value=now,
            remedy="try again later" + (f", or raise {setting}" if setting else ""),
        )


class _Body:
    """The place of one request, and its body as it comes in."""

    def __init__(self, admission: Admission, receive: Receive, length: int) -> None:
        self._admission, self._receive, self._held = admission, receive, length
        self._received = 0
        self.error: ServiceError | None = None

    def admit(self) -> None:
        """Takes the place. Raises TooLarge or Overloaded."""
        load = self._admission.load
        if self._held > self._admission.max_body_bytes:
            raise self._admission.too_large(self._held)
        if load.requests >= load.request_limit:
            raise self._admission.overloaded("requests", load.requests, load.request_limit)
        if load.body_bytes + self._held > load.body_bytes_limit:
            raise self._bytes_overloaded()
        load.requests += 1
        load.body_bytes += self._held

    def leave(self) -> None:
        self._admission.load.requests -= 1
        self._admission.load.body_bytes -= self._held

    async def receive(self) -> Message:
        """The next message. Raises TooLarge or Overloaded."""
        message = await self._receive()
        if message["type"] == "http.request":
            try:
                self._count(len(message.get("body", b"")))
            except ServiceError as error:
                self.error = error
                raise
        return message

    def _count(self, size: int) -> None:
        """Without a Content-Length the bytes take their place as they come."""
        load = self._admission.load
        self._received += size
        if self._received > self._admission.max_body_bytes:
            raise self._admission.too_large(self._received)
        if (more := self._received - self._held) > 0:
            if load.body_bytes + more > load.body_bytes_limit:
                raise self._bytes_overloaded()
            self._held += more
            load.body_bytes += more

    def _bytes_overloaded(self) -> Overloaded:
        load = self._admission.load
        return self._admission.overloaded("body_bytes", load.body_bytes, load.body_bytes_limit, "max_body_mb")
