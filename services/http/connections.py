"""Limits on connections before there is a request: their number, their time, and the size of
headers.

uvicorn's settings limit none of these (docs/adr/0011-connections.md has the figures). Only
`BoundedConnection` knows uvicorn's connection: it overrides callbacks of `asyncio.Protocol` and of
httptools' parser, and `send_400_response`, and reads `connections`, `cycle`, `flow` and
`transport`.
tests/fuzz/test_connections.py tests each bound over real sockets.
"""

import asyncio
import logging
import resource
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import NotReady, ServiceError

log = logging.getLogger(__name__)
PATIENCE_S = 30.0
"""Seconds for receiving the head of a request."""
READER_PATIENCE_S = 120.0
"""Seconds to wait for a client that does not read its response."""
MIN_BYTES_PER_S = 1000
"""Minimum rate of a request body, measured over `PATIENCE_S`."""
MAX_HEAD_BYTES = 128 << 10
"""Limit on request line and headers, or anything else between two parts of a body. Checked as data
arrives."""
MAX_CONNECTIONS = 8192
"""Limit on open connections, unless file descriptors limit them further."""
_OWN_FILES = 256


def max_connections() -> int:
    """Returns the limit on connections that leaves enough file descriptors for the process's own
    files.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(MAX_CONNECTIONS, files - _OWN_FILES))


class BoundedConnection(HttpToolsProtocol):
    """A uvicorn connection that is closed when the client is too slow or sends too much outside
    bodies.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._received = 0
        """Bytes since `_late` was set."""
        self._outside_bodies = 0
        """Bytes since the last part of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            log.warning("a connection is refused: %d are open", len(self.connections) - 1)
            self._refuse(
                NotReady(
                    "too many connections",
                    remedy="try again later, over fewer connections",
                    code="overloaded",
                )
            )
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received += len(data)
        self._outside_bodies += len(data)
        super().data_received(data)
        if self._outside_bodies > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                ServiceError(
                    "the headers are too large",
                    code="headers_too_large",
                    status=431,
                    remedy="send fewer or shorter headers",
                )
            )
        self._watch()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._outside_bodies = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._outside_bodies = 0

    def _watch(self) -> None:
        """Runs the timer while the client should be sending."""
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.more_body and not cycle.response_complete
        if is_answering:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._received = 0
            self._late = self.loop.call_later(PATIENCE_S, self._on_late)

    def _on_late(self) -> None:
        self._late = None
        has_head = self.cycle is not None and self.cycle.more_body
        if has_head and (self.flow.read_paused or self._received >= MIN_BYTES_PER_S * PATIENCE_S):
            self._watch()
        elif not self.transport.is_closing():
            log.info(
                "a connection is closed: no complete request arrived within %.0f s", PATIENCE_S
            )
            if has_head:
                reason = f"the rest of the body did not arrive within {PATIENCE_S:.0f} s"
                self._refuse(
                    ServiceError(
                        reason, code="stalled", status=408, field="body", remedy="send it again"
                    )
                )
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _check_reader(self, before: int | None = None) -> None:
        """Closes the connection when the client has read nothing since `before` bytes were left."""
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            log.info(
                "a connection is closed: its client read nothing of its answer for %.0f s",
                READER_PATIENCE_S,
            )
            self.transport.abort()
        else:
            self._stuck = self.loop.call_later(READER_PATIENCE_S, self._check_reader, left)

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            ServiceError(
                "this is not HTTP/1.1",
                code="bad_request",
                status=400,
                remedy="see the log of the client",
            )
        )

    def _refuse(self, error: ServiceError) -> None:
        """Sends the error, unless a response has begun, and closes the connection."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            content = orjson.dumps(error.body())
            head = [
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(content)}",
                "connection: close",
            ]
            if error.status == 503:
                head.insert(2, "retry-after: 1")
            self.transport.write("\r\n".join([*head, "", ""]).encode() + content)
        self.transport.close()
