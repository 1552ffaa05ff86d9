"""Connections to services: aiohttp behind httpx's interface.

With hundreds of requests in flight, httpx's own pool takes more CPU than the services
(docs/adr/0011-connections.md).
"""

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from common.errors import ServiceError
from common.process.security import trusted

_READ_BYTES = 1 << 20
"""Largest chunk read from a response: each read costs about the same whatever its size."""
_PIECES_FROM_BYTES = 1 << 20
"""Requests of this size are sent in pieces, so that one sees how far they are."""
_PIECE_BYTES = 64 << 10


Receive = Callable[[AsyncIterable[bytes]], Awaitable[Path]]
"""Writes the pieces of a body to a file, and returns it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response with its whole body."""

    status_code: int
    headers: Mapping[str, str]
    """Their names' case does not matter."""
    content: bytes = b""
    file: Path | None = None
    """The file that has the body instead (`Sent.receive`)."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Returns the body as JSON. Raises ValueError."""
        return json.loads(self.content)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a client."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes
    connect_s: float
    """The time for a connection; the caller limits that of the whole."""
    moved: Callable[[int], None]
    """Is called with the bytes of both bodies so far."""
    receive: Receive | None
    """Receives the body of a successful response into a file; None: it is kept in memory."""


def refuse_compressed(headers: Mapping[str, str]) -> None:
    """Refuses compressed responses, where a few bytes could expand to gigabytes. No service sends
    one.
    """
    encoding = headers.get("content-encoding")
    if encoding:
        raise ServiceError(
            "the response is compressed, although the request did not ask for that",
            field="content-encoding",
            value=encoding,
        )


async def exchange(transport: httpx.AsyncBaseTransport, sent: Sent) -> Reply:
    """Sends a request over any transport. Raises httpx.TransportError.

    Over the network it bypasses httpx, whose requests and responses took half of a small call.
    """
    if isinstance(transport, Network):
        return await transport.exchange(sent)
    limits = httpx.Timeout(None, connect=sent.connect_s)
    request = httpx.Request(
        sent.method,
        sent.url,
        headers=sent.headers,
        content=sent.content,
        extensions={"timeout": limits.as_dict(), "moved": sent.moved},
    )
    response = await transport.handle_async_request(request)
    try:
        refuse_compressed(response.headers)
        if sent.receive is not None and response.is_success:
            file = await sent.receive(response.aiter_bytes())
            return Reply(response.status_code, response.headers, file=file)
        return Reply(response.status_code, response.headers, await response.aread())
    finally:
        await response.aclose()


class Network(httpx.AsyncBaseTransport):
    """Sends requests whose bodies are bytes.

    It ignores the cluster's proxies, which must not intercept names of the group. Every connection
    resolves its name again. Raises httpx.TransportError.
    """

    def __init__(self) -> None:
        self._trusted = trusted()
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request; the response is a stream. Calls `request.extensions["moved"]`, if there
        is one, with the bytes of both bodies so far.
        """
        limits = request.extensions["timeout"]
        moved: Callable[[int], None] = request.extensions.get("moved", _ignore)
        content = request.content
        with _httpx_errors():
            # Entered and not awaited: the watchdog sees where a coroutine waits, but not through
            # aiohttp's wrapper of one.
            answer = await self._call(
                request.method,
                str(request.url),
                request.headers.multi_items(),
                content,
                timeout=aiohttp.ClientTimeout(
                    sock_connect=limits["connect"], sock_read=limits["read"]
                ),
                moved=moved,
            ).__aenter__()
        stream = _Body(answer, len(content), moved)
        return httpx.Response(answer.status, headers=answer.raw_headers, stream=stream)

    async def exchange(self, sent: Sent) -> Reply:
        """See the function `exchange`."""
        size = len(sent.content)
        with _httpx_errors():
            answer = await self._call(
                sent.method,
                sent.url,
                sent.headers,
                sent.content,
                timeout=aiohttp.ClientTimeout(sock_connect=sent.connect_s),
                moved=sent.moved,
            ).__aenter__()
            try:
                refuse_compressed(answer.headers)
                pieces = _Body(answer, size, sent.moved)
                if sent.receive is not None and answer.status // 100 == 2:
                    file = await sent.receive(pieces)
                    return Reply(answer.status, answer.headers, file=file)
                # A stream of its own costs more than the rest of a small answer.
                if (answer.content_length or _READ_BYTES) < _READ_BYTES:
                    content = await answer.read()
                    sent.moved(size + len(content))
                else:
                    content = b"".join([piece async for piece in pieces])
            finally:
                answer.release()
        return Reply(answer.status, answer.headers, content)

    def _call(
        self,
        method: str,
        url: str,
        headers: Any,
        content: bytes,
        *,
        timeout: aiohttp.ClientTimeout,
        moved: Callable[[int], None],
    ) -> Any:
        """Returns aiohttp's call, which has not begun."""
        if self._session is None:
            self._session = self._open()
        data: Any = None
        if len(content) >= _PIECES_FROM_BYTES:
            data = _pieces(content, moved)
        elif content:
            # Given as bytes, aiohttp would ask each of its kinds of bodies whether it takes them.
            data = aiohttp.BytesPayload(content)
        return self._session.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            auto_decompress=False,
        )

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            use_dns_cache=False,  # after a recovery a name has a new address
            keepalive_timeout=20,
            ssl=self._trusted,
        )
        return aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BYTES,
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Body(httpx.AsyncByteStream):
    """The body of an answer; calls `moved` with the bytes of the request and of the answer so
    far.
    """

    def __init__(
        self, answer: aiohttp.ClientResponse, sent: int, moved: Callable[[int], None]
    ) -> None:
        self._answer = answer
        self._bytes = sent
        self._moved = moved

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for chunk in self._answer.content.iter_chunked(_READ_BYTES):
                self._bytes += len(chunk)
                self._moved(self._bytes)
                yield chunk

    async def aclose(self) -> None:
        self._answer.release()


def _ignore(_: int) -> None:
    pass


async def _pieces(content: bytes, moved: Callable[[int], None]) -> AsyncIterator[bytes]:
    """Yields a body in pieces; the next one is asked for when the connection takes more."""
    for begin in range(0, len(content), _PIECE_BYTES):
        yield content[begin : begin + _PIECE_BYTES]
        moved(begin)


@contextmanager
def _httpx_errors() -> Iterator[None]:
    """Raises httpx's error in place of one of aiohttp."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise httpx.TransportError(str(error) or type(error).__name__) from error
