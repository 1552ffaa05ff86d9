"""Connections to services: aiohttp behind httpx's interface.

With hundreds of requests in flight, httpx's own pool takes more CPU than the services
(docs/adr/0011-connections.md).
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import httpx

from common.process.security import trusted

_READ_BYTES = 1 << 20
"""Largest chunk read from a response: each read costs about the same whatever its size."""


class Network(httpx.AsyncBaseTransport):
    """Sends requests whose bodies are bytes.

    It ignores the cluster's proxies, which must not intercept names of the group. Every connection
    resolves its name again. Raises httpx.TransportError.
    """

    def __init__(self) -> None:
        self._trusted = trusted()
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:
            self._session = self._open()
        limits = request.extensions["timeout"]
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ]
        timeout = aiohttp.ClientTimeout(sock_connect=limits["connect"], sock_read=limits["read"])
        with _httpx_errors():
            # Entered and not awaited: the watchdog sees where a coroutine waits, but not through
            # aiohttp's wrapper of one.
            call = self._session.request(
                request.method,
                str(request.url),
                data=request.content or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                auto_decompress=False,
            )
            answer = await call.__aenter__()
        return httpx.Response(answer.status, headers=answer.raw_headers, stream=_Body(answer))

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
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for chunk in self._answer.content.iter_chunked(_READ_BYTES):
                yield chunk

    async def aclose(self) -> None:
        self._answer.release()


@contextmanager
def _httpx_errors() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise httpx.TransportError(str(error) or type(error).__name__) from error
