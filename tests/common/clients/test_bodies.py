"""What arrives at a service is what was given to its client, and a cancelled call leaves nothing open."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from common.clients.base import Client

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve(answer: Answer) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("content", ['{"text": "½ × 4 = 2 ✓"}', b"\x00\xff", "x" * (3 << 20)])
async def test_a_body_arrives_whole(content: str | bytes) -> None:
    """The length of a text is that of its bytes, not of its characters."""
    expected = content.encode() if isinstance(content, str) else content
    received = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        received.extend(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server, port = await serve(answer)
    async with Client("reward-server", f"http://127.0.0.1:{port}") as client:
        response = await client.request("POST", "/", content=content)
    server.close()
    assert response.text == "ok"
    assert bytes(received) == expected


@pytest.mark.parametrize("size", [0, 10, 3 << 20])
async def test_an_answer_is_read_in_pieces(size: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        await writer.drain()
        writer.close()

    server, port = await serve(answer)
    client = Client("trainer", f"http://127.0.0.1:{port}")
    async with client, client.http.stream("GET", "/") as response:
        pieces = [piece async for piece in response.aiter_raw()]
    server.close()
    assert b"".join(pieces) == b"x" * size


async def test_a_call_that_is_cancelled_while_it_reads_leaves_no_connection() -> None:
    begun = asyncio.Event()
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        begun.set()
        await reader.read()  # until the client closes
        closed.set()
        writer.close()

    server, port = await serve(answer)
    async with Client("replay-buffer", f"http://127.0.0.1:{port}") as client:
        call = asyncio.create_task(client.request("GET", "/"))
        await begun.wait()
        await asyncio.sleep(0.05)
        call.cancel()
        (cancelled,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError)
        await asyncio.wait_for(closed.wait(), 20)  # although the error still holds the answer
    server.close()
