"""Lets containers that reach nothing else reach this server's gateway."""

import asyncio
import contextlib
import errno
from pathlib import Path
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class Gate:
    """Passes connections on to the gateway, from a socket file or from another address.

    Args:
        gateway: URL of this server.
    """

    def __init__(self, gateway: str) -> None:
        address = urlsplit(gateway)
        self.host = address.hostname or ""
        self.port = address.port or (443 if address.scheme == "https" else 80)
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()  # several episodes begin at once
        self._open: set[asyncio.StreamWriter] = set()

    async def open_file(self, path: Path) -> None:
        """Listens at a socket file that every user may open."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_unix_server(self._pass_on, path)
                await asyncio.to_thread(path.chmod, 0o666)

    async def open_address(self, address: str) -> None:
        """Listens at the gateway's port of another address, unless the gateway does so itself."""
        async with self._opening:
            if self._server is not None:
                return
            try:
                self._server = await asyncio.start_server(self._pass_on, address, self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    async def close(self) -> None:
        """Stops listening, and ends what is connected."""
        if self._server is not None:
            self._server.close()
            self._server = None
        ending = list(self._open)
        for writer in ending:
            writer.close()
        await asyncio.gather(*[each.wait_closed() for each in ending], return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.close()
            return
        both = {back, writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, back))
                group.create_task(_copy(there, writer))
        finally:
            self._open -= both


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
