"""Limits on connections before there is a request: their number, their time, and the size of
headers; and what became of their answers (`delivery`).

uvicorn's settings limit none of these (docs/adr/0011-connections.md has the figures). Only
`BoundedConnection` knows uvicorn's connection: it overrides callbacks of `asyncio.Protocol` and of
httptools' parser, `send_400_response`, `shutdown` and `timeout_keep_alive_handler`, and reads
`connections`, `cycle`, `flow`, `scope` and `transport`.
tests/fuzz/test_connections.py tests each bound over real sockets, and
tests/services/http/test_delivery.py what became of answers.
"""

import asyncio
import logging
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import NotReady, ServiceError
from services.http.delivery import Delivery, has_unread, was_taken

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
MAX_UNREAD_BYTES = 512 << 20
"""Limit on what is still read, and dropped, of a body whose request has been answered, refused for
example. Most clients read an answer when they have sent all of a body; if the connection is closed
before that, they see a reset and no answer. It is twice the largest body that a service takes
without other settings."""
_MIN_UNREAD_BYTES_PER_S = 100 * MIN_BYTES_PER_S
"""Minimum rate of such a body: it may come from a stranger."""
_HTTP2 = b"PRI * HTTP/2.0"
"""First bytes of a connection that speaks HTTP/2. The router tries that with every engine and then
uses HTTP/1.1, so uvicorn need not warn of an invalid request."""
MAX_CONNECTIONS = 8192
"""Limit on open connections, unless file descriptors limit them further."""
_OWN_FILES = 256
_EXTENSION = "rlhf"
"""The key in `scope["extensions"]` of a mapping that has the `connection` of the request."""


def max_connections() -> int:
    """Returns the limit on connections that leaves enough file descriptors for the process's own
    files.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(MAX_CONNECTIONS, files - _OWN_FILES))


class BoundedConnection(HttpToolsProtocol):
    """A uvicorn connection that is closed when the client is too slow or sends too much outside
    bodies, and that follows its answers.
    """

    refused = 0
    """Connections of this process that were refused unread, since too many were open."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._received = 0
        """Bytes since `_late` was set."""
        self._outside_bodies = 0
        """Bytes since the last part of a body."""
        self._in_body = False
        """Whether the client is in the middle of a body."""
        self._unread_bytes = 0
        """Bytes of the current body that came after its answer."""
        self.deliveries: list[Delivery] = []
        """Answers that were sent and that the client may still be reading."""
        self._socket: Any = None
        self.when_lost: Callable[[], None] | None = None
        """Called when the client has left."""

    @property
    def is_lost(self) -> bool:
        """Whether the client has left."""
        return self.transport.is_closing()

    def deliver(self) -> Delivery:
        """Follows the answer to the request, which is sent now."""
        if self._socket is None:
            sock = self.transport.get_extra_info("socket")
            # In TLS the socket is closed before `connection_lost`.
            self._socket = sock.dup() if self.scheme == "https" else sock
        delivery = Delivery(self._look)
        self.deliveries.append(delivery)
        return delivery

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            log.warning("a connection is refused: %d are open", len(self.connections) - 1)
            BoundedConnection.refused += 1
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
        self._end_deliveries(taken=None if exc is None else False)
        if self._socket is not None and self.scheme == "https":
            self._socket.close()
        super().connection_lost(exc)
        if self.when_lost is not None:
            self.when_lost()

    def eof_received(self) -> None:
        self._end_deliveries()  # before TLS says goodbye to a client that may not read it
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._received == 0 and data.startswith(_HTTP2):
            self.send_400_response("HTTP/2")
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
        if self._is_unread:
            self._unread_bytes += len(data)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                log.info("a connection is closed: its client goes on sending after the answer")
                self.transport.close()
        self._watch()

    @property
    def _is_unread(self) -> bool:
        """Whether the client is sending a body that nobody reads, as its request is answered."""
        return self._in_body and self.cycle.response_complete

    def on_message_begin(self) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            # It has read the answer before.
            self._end_deliveries(taken=True)
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body = True
        self._unread_bytes = 0
        self.cycle.transport = _OfAnswer(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._outside_bodies = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._outside_bodies = 0
        self._in_body = False

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
        rate = _MIN_UNREAD_BYTES_PER_S if self._is_unread else MIN_BYTES_PER_S
        is_steady = self.flow.read_paused or self._received >= rate * PATIENCE_S
        if (self._in_body and is_steady) or self._has_unread:
            self._watch()
        elif not self.transport.is_closing():
            log.info(
                "a connection is closed: no complete request arrived within %.0f s", PATIENCE_S
            )
            if self._in_body and not self._is_unread:
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
            self._end_deliveries(taken=False)
            self.transport.abort()
        else:
            self._stuck = self.loop.call_later(READER_PATIENCE_S, self._check_reader, left)

    @property
    def _has_unread(self) -> bool:
        """Whether a busy server has yet to read what the client sent: timers come before that."""
        return has_unread(self.transport.get_extra_info("socket"))

    def timeout_keep_alive_handler(self) -> None:
        if self._has_unread:
            return
        self._end_deliveries()  # as in eof_received
        super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        self._end_deliveries()
        super().shutdown()

    @property
    def _is_sent(self) -> bool:
        """Whether the kernel has the whole answer."""
        return self.cycle.response_complete and not self.transport.get_write_buffer_size()

    def _look(self) -> bool | None:
        """Returns what is known of the answers while the connection is open."""
        taken = was_taken(self._socket)
        return taken and self._is_sent

    def _end_deliveries(self, taken: bool | None = None) -> None:
        """Ends following the answers; what the connection tells decides, unless `taken` does."""
        if not self.deliveries:
            return
        if taken is None:
            # None: this server closes an idle connection.
            taken = self._is_sent and was_taken(self._socket) is not False
        for delivery in self.deliveries:
            delivery.end(taken)
        self.deliveries.clear()

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


def connection_of(scope: Scope) -> BoundedConnection | None:
    """Returns the connection of a request; None when client and server are one process."""
    extension = scope.get("extensions", {}).get(_EXTENSION, {})
    connection: BoundedConnection | None = extension.get("connection")
    return connection


class _OfAnswer:
    """The transport of an answer. Its head is sent with the first part of its body, as one packet
    that wakes the client once.

    After its last answer a connection is closed by the client, when it has read the answer; how it
    closes tells whether it has. If it does not close, the time-out of idle connections ends it.
    """

    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection
        self._held: bytes | None = None
        self._sending: asyncio.Handle | None = None
        self.is_closing = connection.transport.is_closing

    def write(self, content: bytes) -> None:
        """Sends a part of the answer; the first part in the next round of the event loop, unless
        another one comes before.
        """
        if self._sending is None:
            self._held = content
            self._sending = self._connection.loop.call_soon(self._send_held)
        elif self._held is not None:
            both = (self._held, content)
            self._held = None
            self._sending.cancel()
            self._connection.transport.writelines(both)
        else:
            self._connection.transport.write(content)

    def _send_held(self) -> None:
        if self._held is not None and not self.is_closing():
            self._connection.transport.write(self._held)
        self._held = None

    def close(self) -> None:
        """Ends an answer."""
        self._send_held()
        is_whole = self._connection.cycle.response_complete
        if not (is_whole and self._connection.deliveries):
            self._connection.transport.close()
