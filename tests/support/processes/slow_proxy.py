"""A proxy on a real socket whose answers arrive slowly, or stop in the middle."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from common.process.loop_thread import LoopThread

_PIECES_PER_S = 20


class SlowProxy:
    """Forwards connections to a service on this machine; every answer's connection passes
    `bytes_per_s`. After `stop_after` further bytes of answers nothing passes any more.
    """

    def __init__(self, service_port: int, bytes_per_s: float) -> None:
        self._service_port = service_port
        self._bytes_per_s = bytes_per_s
        self._left: float = float("inf")
        self._lock = threading.Lock()

    def stop_after(self, count: float) -> None:
        with self._lock:
            self._left = count

    @contextmanager
    def running(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
        """Runs the proxy in a thread and yields its port."""
        with LoopThread() as loop:
            server = loop.call(asyncio.start_server(self._serve, host, port))
            try:
                yield server.sockets[0].getsockname()[1]
            finally:
                loop.call(_closed(server))

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        service, requests = await asyncio.open_connection("127.0.0.1", self._service_port)
        try:
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(_copy(client, requests), self._slow_copy(service, answers))
        finally:
            answers.close()
            requests.close()

    async def _slow_copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        piece = max(1, int(self._bytes_per_s / _PIECES_PER_S))
        while data := await source.read(piece):
            if not self._may_pass(len(data)):
                await asyncio.Event().wait()
            target.write(data)
            await target.drain()
            await asyncio.sleep(len(data) / self._bytes_per_s)
        target.close()

    def _may_pass(self, count: int) -> bool:
        with self._lock:
            if self._left <= 0:
                return False
            self._left -= count
            return True


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    target.close()


async def _closed(server: asyncio.Server) -> None:
    server.close()
    open_connections = asyncio.all_tasks() - {asyncio.current_task()}
    for task in open_connections:
        task.cancel()
    await asyncio.gather(*open_connections, return_exceptions=True)
    await asyncio.sleep(0)  # for the transports to close
