"""A large body may take longer than the time of a call, as long as its bytes move; one that stops
does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.clients.base import Client, Unreachable
from tests.support.errors import raises

LIMIT_S = 4.0
PIECE = b"x" * (24 << 10)
SLICES = 50
"""Pieces of a body, 0.2 s apart: more than twice the limit."""


@asynccontextmanager
async def answering(part: str) -> AsyncIterator[Client]:
    """Serves one kind of slowness over a real socket."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _answer(part, reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16)
    port = server.sockets[0].getsockname()[1]
    async with Client("reward-server", f"http://127.0.0.1:{port}", deadline_s=LIMIT_S) as client:
        yield client
    server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def _answer(part: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if part == "reads":
        left = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while left:
            left -= len(await reader.read(min(left, 1 << 20)))
            await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        return

    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (SLICES * len(PIECE)))
    for number in range(SLICES):
        piece = b"x" if part == "trickles" else PIECE
        writer.write(piece)
        await writer.drain()
        if part == "stops" and number == SLICES // 2:
            await asyncio.Event().wait()
        if part == "breaks" and number == SLICES // 2:
            return
        await asyncio.sleep(0.2)
    await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_body_that_arrives_slowly_is_received() -> None:
    async with answering("sends") as client:
        response = await client.request("GET", "/values")
    assert response.content == PIECE * SLICES


async def test_a_body_that_is_taken_slowly_is_sent() -> None:
    """The system's buffers take only a part of it at once."""
    async with answering("reads") as client:
        response = await client.request("POST", "/values", content=b"x" * (20 << 20))
    assert response.content == b"ok"


@pytest.mark.parametrize("part", ["stops", "trickles"])
async def test_a_body_that_stops_ends_the_call(part: str) -> None:
    async with answering(part) as client:
        with raises(Unreachable, field="url"):
            await client.request("GET", "/values")


@pytest.mark.slow
async def test_an_answer_that_breaks_at_the_same_byte_is_no_progress() -> None:
    async with answering("breaks") as client:
        with pytest.raises(Unreachable, match="did not answer GET /values in time"):
            await client.request("GET", "/values")
