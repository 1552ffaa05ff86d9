"""Connections to services: aiohttp behind httpx's interface.

With hundreds of requests in flight, httpx's own pool takes more CPU than the services
(docs/adr/0011-connections.md).
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import aiohttp
import httpx

from common.process.security import trusted

_READ_BYTES = 1 << 20
"""Largest chunk read from a response: each read costs about the same whatever its size."""
_PIECES_FROM_BYTES = 1 << 20
"""Requests of this size are sent in pieces, so that one sees how far they are."""
_PIECE_BYTES = 64 << 10


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
        if self._session is None:
            self._session = self._open()
        content = request.content
        moved: Callable[[int], None] = request.extensions.get("moved", _ignore)
        body: bytes | AsyncIterator[bytes] | None = content or None
        if len(content) >= _PIECES_FROM_BYTES:
            body = _pieces(content, moved)
        limits = request.extensions["timeout"]
        # Entered and not awaited: the watchdog sees where a coroutine waits, but not through
        # aiohttp's wrapper of one.
        call = self._session.request(
            request.method,
            str(request.url),
            data=body,
            headers=request.headers.multi_items(),
            timeout=aiohttp.ClientTimeout(sock_connect=limits["connect"], sock_read=limits["read"]),
            allow_redirects=False,
            auto_decompress=False,
        )
        with _httpx_errors():
            answer = await call.__aenter__()
            # A stream of its own costs more than the rest of a small answer.
            if (answer.content_length or _READ_BYTES) < _READ_BYTES:
                body = await answer.read()
                moved(len(content) + len(body))
                whole = httpx.ByteStream(body)
                return httpx.Response(answer.status, headers=answer.raw_headers, stream=whole)
        stream = _Body(answer, len(content), moved)
        return httpx.Response(answer.status, headers=answer.raw_headers, stream=stream)

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
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise httpx.TransportError(str(error) or type(error).__name__) from error
