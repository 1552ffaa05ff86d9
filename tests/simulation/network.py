"""Nodes that crash and come back, and a network that loses, delays and repeats what it carries."""

import asyncio
import contextlib
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.requests import ClientDisconnect

from tests.simulation.disk import Disk
from tests.simulation.models import Broken, Model
from tests.simulation.virtual_time import VirtualLoop, process

_T = TypeVar("_T")
App = Callable[..., Coroutine[Any, Any, None]]


class Story:
    """What happened, line by line, for whoever replays a seed."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lines: list[str] = []
        self.faults = Counter[str]()
        self._now = now

    def say(self, text: str) -> None:
        self.lines.append(f"{self._now():10.3f}  {text}")

    def fault(self, kind: str, text: str) -> None:
        self.faults[kind] += 1
        self.say(f"FAULT {kind}: {text}")


class Node:
    """A process with a disk. A crash takes its memory."""

    def __init__(
        self,
        name: str,
        make: Callable[[Path], App],
        *,
        loop: VirtualLoop,
        disk: Disk,
        story: Story,
        model: Model,
    ) -> None:
        self.name = name
        self.model = model
        self.disk = disk
        self._make = make
        self._loop = loop
        self._story = story
        self.errors: list[Exception] = []
        """What its handlers raised and no error handler expects; promises that it broke."""
        self.is_cut_off = False
        """Whether the network does not reach it."""
        self.app: App | None = None

    def start(self) -> None:
        try:
            self.app = self._make(self.disk.path)
        except Exception as error:
            self.errors.append(error)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Runs something in the process, which knows nothing of who asked for it."""
        context = contextvars.Context()
        context.run(process.set, self.name)
        return self._loop.create_task(coroutine, context=context)

    def crash(self, text: str = "") -> None:
        """Ends the process at this moment."""
        self._story.fault("crash", f"{self.name} {text}")
        self.disk.fail()
        self.app = None
        for task in self._loop.tasks_of(self.name):
            task.cancel()

    async def answer(self, request: httpx.Request, size: int | None = None) -> httpx.Response:
        """Answers a request, of whose body `size` bytes arrive before its connection breaks.

        Raises ConnectError while the process is down, ReadError when it ends before it has
        answered. It goes on with its work when the client has gone.
        """
        if self.app is None:
            raise httpx.ConnectError("refused")
        answered = self.model.asked(request) if size is None else None
        task = self.run(serve(self.app, request, size))
        await asyncio.wait({task})
        if task.cancelled():
            raise httpx.ReadError("the connection was reset")
        error = task.exception()
        if isinstance(error, Exception):
            self.errors.append(error)
            return httpx.Response(500)
        response = task.result()
        if answered is not None and response.is_success:
            try:
                answered(response)
            except Broken as broken:
                self.errors.append(broken)
        return response


async def serve(app: App, request: httpx.Request, size: int | None = None) -> httpx.Response:
    """Calls an app as a server does; with `size` the connection breaks after so many bytes of the
    body.
    """
    url = request.url
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.split(b"?")[0],
        "query_string": url.query,
        "server": (url.host, url.port or 80),
        "client": ("trainer", 1),
        "root_path": "",
    }
    body = request.content
    arriving = [{"type": "http.request", "body": body[:size], "more_body": size is not None}]
    answered = asyncio.Event()
    status = 0
    headers: list[tuple[bytes, bytes]] = []
    answer = b""

    async def receive() -> dict[str, Any]:
        if arriving:
            return arriving.pop()
        if size is None:
            await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers, answer
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = list(message.get("headers", []))
            return
        answer += message.get("body", b"")
        if not message.get("more_body"):
            answered.set()

    with contextlib.suppress(ClientDisconnect):
        await app(scope, receive, send)
    return httpx.Response(status or 500, headers=headers, content=answer)


class Chance:
    """Draws faults: about `rate` of the calls have one."""

    KINDS = (
        "lost request",
        "cut request",
        "lost answer",
        "repeated",
        "late copy",
        "slow",
        "silent",
        "busy",
    )

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng = rng
        self._rate = rate
        self.on = True

    def draw(self) -> str:
        if not self.on or self.rng.random() >= self._rate:
            return ""
        return self.rng.choice(self.KINDS)


class Wire(httpx.AsyncBaseTransport):
    """The connection of one client to one node."""

    def __init__(self, node: Node, chance: Chance, story: Story) -> None:
        self._node = node
        self._chance = chance
        self._story = story
        self.copies: set[asyncio.Task[None]] = set()
        """Copies of requests that are still on their way."""
        self.is_cut = False
        """Whether the client's process has ended, or the network between the two is broken."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                return await self._carry(request)
        except TimeoutError:
            raise httpx.ReadTimeout("no byte") from None

    async def _carry(self, request: httpx.Request) -> httpx.Response:
        if self.is_cut:
            raise httpx.ConnectError("the process has ended")
        rng = self._chance.rng
        kind = self._chance.draw()
        what = f"{request.method} {request.url.path} to {self._node.name}"
        if kind:
            self._story.fault(kind, what)
        await asyncio.sleep(rng.uniform(0.0005, 30.0 if kind == "slow" else 0.01))
        if self._node.is_cut_off:
            await asyncio.sleep(1e6)
        if kind == "lost request":
            raise httpx.ReadError("lost")
        if kind == "busy":
            return httpx.Response(503, headers={"retry-after": "0.1"})
        if kind == "repeated":
            self._later(request, 0.0)
        if kind == "late copy":
            self._later(request, rng.uniform(1.0, 120.0))
        if kind == "cut request":
            await self._node.answer(request, rng.randrange(len(request.content) + 1))
            raise httpx.ReadError("the connection broke")
        response = await self._node.answer(request)
        if kind == "lost answer":
            raise httpx.ReadError("lost")
        if kind == "silent":
            await asyncio.sleep(1e6)
        await asyncio.sleep(rng.uniform(0.0005, 0.01))
        return response

    def _later(self, request: httpx.Request, delay_s: float) -> None:
        """Delivers a copy of a request whose answer nobody reads."""

        async def deliver() -> None:
            await asyncio.sleep(delay_s)
            with contextlib.suppress(httpx.TransportError):
                await self._node.answer(request)

        task = asyncio.ensure_future(deliver())
        self.copies.add(task)
        task.add_done_callback(self.copies.discard)
