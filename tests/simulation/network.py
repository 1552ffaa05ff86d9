"""Nodes that crash and come back, and a network that loses, delays and repeats what it carries."""

import asyncio
import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

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
    """A process with a disk. A crash takes its memory and leaves its files as they are."""

    def __init__(
        self, name: str, make: Callable[[Path], App], directory: Path, story: Story
    ) -> None:
        self.name = name
        self._make = make
        self._root = directory
        self._story = story
        self._lives = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.app: App | None = None
        self.start()

    @property
    def disk(self) -> Path:
        return self._root / str(self._lives)

    def start(self) -> None:
        self.disk.mkdir(parents=True, exist_ok=True)
        self.app = self._make(self.disk)

    def crash(self) -> None:
        """Ends the process at this moment: what its tasks still do reaches a disk nobody reads."""
        before = self.disk
        self._lives += 1
        shutil.copytree(before, self.disk)
        self.app = None
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        self._story.fault("crash", self.name)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Answers a request; raises ConnectError while the process is down, ReadError when it ends
        before it has answered.
        """
        if self.app is None:
            raise httpx.ConnectError("refused")
        task = asyncio.ensure_future(self._handle(self.app, request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()  # the client has gone, and the server sees its connection close
            raise
        if task.cancelled():
            raise httpx.ReadError("the connection was reset")
        return task.result()

    @staticmethod
    async def _handle(app: App, request: httpx.Request) -> httpx.Response:
        copy = httpx.Request(
            request.method, request.url, headers=request.headers, content=request.content
        )
        response = await httpx.ASGITransport(app).handle_async_request(copy)
        await response.aread()
        return response


class Chance:
    """Draws faults: about `rate` of the calls have one."""

    KINDS = ("lost request", "lost answer", "repeated", "late copy", "slow", "silent")

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
        """Whether the client's process has ended."""

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
        if kind == "lost request":
            raise httpx.ReadError("lost")
        if kind == "repeated":
            self._later(request, 0.0)
        if kind == "late copy":
            self._later(request, rng.uniform(1.0, 120.0))
        response = await self._node.answer(request)
        if kind == "lost answer":
            raise httpx.ReadError("lost")
        if kind == "silent":
            await asyncio.sleep(1e6)
        await asyncio.sleep(rng.uniform(0.0005, 0.01))
        return httpx.Response(
            response.status_code, headers=response.headers, content=response.content
        )

    def _later(self, request: httpx.Request, delay_s: float) -> None:
        """Delivers a copy of a request whose answer nobody reads."""

        async def deliver() -> None:
            await asyncio.sleep(delay_s)
            with contextlib.suppress(httpx.TransportError):
                await self._node.answer(request)

        task = asyncio.ensure_future(deliver())
        self.copies.add(task)
        task.add_done_callback(self.copies.discard)
