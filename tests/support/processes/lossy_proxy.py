"""A proxy on a real socket that loses answers: it forwards the request to the service, then closes
the connection."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LossyProxy:
    """Loses the first answer to every call (method and path, without the query) after the service
    has done the work."""

    def __init__(self, port: int) -> None:
        self._service, self.port = port, 0
        self.forwarded: Counter[str] = Counter()
        """Number of requests that the service answered, by call."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Runs the proxy and yields its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        service, requests = await asyncio.open_connection("127.0.0.1", self._service)
        try:
            while True:
                first, head = await _message(client)
                requests.write(head)
                _, answer = await _message(service)
                call = first.partition("?")[0].removesuffix(" HTTP/1.1")
                self.forwarded[call] += 1
                if self.forwarded[call] == 1:
                    return
                answers.write(answer)
                await answers.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            answers.close()
            requests.close()


async def _message(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Reads the first line and all bytes of a request or an answer that has a Content-Length or no
    body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    assert "transfer-encoding" not in headers
    return first, head + await reader.readexactly(int(headers.get("content-length", 0)))
