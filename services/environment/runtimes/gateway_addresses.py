"""The gateway at further addresses, for containers that can reach nothing else.

The server itself listens there. So no proxy stands between a container and the server, which sees
how each connection ends (`services.http.delivery`).
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from services.http.app import serving_also

log = logging.getLogger(__name__)
_PAUSE_S = 1.0
"""As in asyncio's own servers."""


class Gate:
    """The gateway at another address, or in the network of a sandbox.

    Args:
        gateway: URL of this server.
    """

    def __init__(self, gateway: str) -> None:
        address = urlsplit(gateway)
        self.host = address.hostname or ""
        self.port = address.port or (443 if address.scheme == "https" else 80)
        self._opening = asyncio.Lock()  # several episodes begin at once
        self._is_open = False
        self._opened = contextlib.AsyncExitStack()

    async def open_file(self, path: Path) -> None:
        """Takes listening sockets at a socket file that every user may open. Each is served until
        its sender ends.
        """
        async with self._opening:
            if self._is_open:
                return
            listener = await asyncio.to_thread(_listen, path)
            accepting = asyncio.create_task(self._accept(listener))
            self._opened.callback(accepting.cancel)
            self._is_open = True

    async def open_address(self, address: str) -> None:
        """Serves at the gateway's port of another address, unless the gateway does so itself."""
        async with self._opening:
            if self._is_open:
                return
            try:
                sock = socket.create_server((address, self.port), backlog=2048)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                await self._opened.enter_async_context(serving_also(self.port, sock))
            self._is_open = True

    async def close(self) -> None:
        """Stops serving there."""
        await self._opened.aclose()

    async def _accept(self, listener: socket.socket) -> None:
        """Serves what each client of the socket file sends, until it is cancelled."""
        loop = asyncio.get_running_loop()
        with listener:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        sender, _ = await loop.sock_accept(listener)
                    except OSError as error:  # such as too many open files
                        log.error("no connection to the gateway can be accepted: %s", error)
                        await asyncio.sleep(_PAUSE_S)
                        continue
                    group.create_task(self._serve(sender))

    async def _serve(self, sender: socket.socket) -> None:
        """Serves at the listening socket that is sent, until its sender ends."""
        try:
            # A program may send anything.
            with sender, contextlib.suppress(OSError, ValueError):
                await _readable(sender)
                _, descriptors, _, _ = socket.recv_fds(sender, 1, 1)
                if not descriptors:
                    return
                with _socket_of(descriptors[0]) as sock:
                    async with serving_also(self.port, sock):
                        await _readable(sender)
        except Exception:  # one sandbox does not close the gate of all
            log.exception("the gateway cannot be served in a sandbox")


def _listen(path: Path) -> socket.socket:
    listener = socket.create_server(str(path), family=socket.AF_UNIX, backlog=128)
    path.chmod(0o666)
    listener.setblocking(False)
    return listener


def _socket_of(descriptor: int) -> socket.socket:
    """Returns the socket that a descriptor is. Closes it and raises OSError when it is none."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


async def _readable(sock: socket.socket) -> None:
    """Waits until a socket has content, or its other end is closed."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
