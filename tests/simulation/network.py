"""Nodes that crash and come back, and a network that loses, delays and repeats what it carries."""

import asyncio
import contextlib
import contextvars
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch
from urllib.parse import parse_qsl, unquote

import httpx
import orjson
from starlette.requests import ClientDisconnect

from common.clients import base
from common.clients.network import Network, Reply, Sent
from common.errors import ConfigError, ServiceError
from services.http import errors
from services.http.delivery import Delivery
from tests.simulation.disk import Disk
from tests.simulation.virtual_time import VirtualLoop, process

_T = TypeVar("_T")
App = Callable[..., Coroutine[Any, Any, None]]
_RESTART_S = 2.0
_WIRES = "network"
"""The process to which copies of requests belong that are still on their way."""


class Broken(AssertionError):
    """A service broke a promise."""


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


class Call(NamedTuple):
    """A request. The names of its headers are in lower case, as all clients send them."""

    method: str
    host: str
    path: str
    query: str
    headers: Mapping[str, str]
    content: bytes

    @classmethod
    def of(cls, method: str, url: str, headers: Mapping[str, str], content: bytes) -> "Call":
        host, slash, rest = url.partition("://")[2].partition("/")
        path, _, query = (slash + rest).partition("?")
        return cls(method, host, path or "/", query, headers, content)

    @property
    def params(self) -> dict[str, str]:
        return dict(parse_qsl(self.query))

    def json(self) -> Any:
        return orjson.loads(self.content)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Connection:
    """What a server knows of the connection of one request (`services.http.connections`)."""

    def __init__(self) -> None:
        self.is_lost = False
        self.when_lost: Callable[[], None] | None = None
        self._deliveries: list[Delivery] = []

    def deliver(self) -> Delivery:
        """Follows an answer until its client has taken it, or not."""
        delivery = Delivery(lambda: None)
        self._deliveries.append(delivery)
        return delivery

    def end(self, taken: bool) -> None:
        """Ends the connection, after its answer was taken or before."""
        for delivery in self._deliveries:
            delivery.end(taken)
        if not taken and not self.is_lost:
            self.is_lost = True
            if self.when_lost is not None:
                self.when_lost()


Answered = Callable[[Reply], None]


class Model:
    """Checks the answers of a node. It knows requests and answers alone."""

    def asked(self, call: Call) -> Answered:
        """Sees a request; returns what sees its answer, if it is a success."""
        return lambda _: None

    def begun(self, call: Call) -> None:
        """Sees that the head of a request has arrived."""

    def forget(self) -> None:
        """Another volume has taken the place of the node's."""


class StandIn(ABC):
    """What answers in the place of a server that is not the product's."""

    @abstractmethod
    async def answer(self, call: Call) -> Reply:
        """Answers a request that has arrived as a whole."""

    async def __call__(self, *_: object) -> None:
        raise AssertionError("it is no ASGI application")


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
        machine: str = "",
    ) -> None:
        self.name = name
        self.machine = machine or name
        """What a partition cuts off; its processes reach each other always."""
        self.model = model
        self.disk = disk
        self.lives = 0
        self.make = make
        self._loop = loop
        self._story = story
        self.errors: list[Exception] = []
        """What its handlers raised and no error handler expects; promises that it broke."""
        self.app: App | None = None

    def start(self) -> None:
        """Begins a life, if the process is down."""
        if self.app is not None:
            return
        try:
            self.app = self._in_process().run(self.make, self.disk.path)
        except ConfigError as error:
            if self.disk.problem is None:
                self.errors.append(error)
                return
            # It ends with the reason, and the job group starts it again.
            self._story.say(f"{self.name} cannot start: {error.message}")
            self._loop.call_later(_RESTART_S, self.start)
        except Exception as error:
            self.errors.append(error)

    def _in_process(self) -> contextvars.Context:
        context = contextvars.Context()
        context.run(process.set, self.name)
        return context

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Runs something in the process, which knows nothing of who asked for it."""
        return self._loop.create_task(coroutine, context=self._in_process())

    def live(self, app: Any) -> "asyncio.Task[None]":
        """Runs the lifespan of an app as long as the process lives."""

        async def until_its_end() -> None:
            async with app.router.lifespan_context(app):
                await asyncio.Event().wait()

        return self.run(until_its_end())

    def crash(self, text: str = "") -> None:
        """Ends the process at this moment."""
        self._story.fault("crash", f"{self.name} {text}".rstrip())
        self.disk.fail()
        self.end()

    def end(self) -> None:
        """Ends the process: its tasks still run to their ends, and reach nobody."""
        self.app = None
        self.lives += 1
        self._loop.go_on(self.name)
        for task in self._loop.tasks_of(self.name):
            task.cancel()

    async def answer(self, call: Call, size: int | None, connection: Connection) -> Reply:
        """Answers a request, of whose body `size` bytes arrive before its connection breaks.

        Raises ConnectError while the process is down, ReadError when it ends before it has
        answered.
        """
        if self.app is None:
            raise httpx.ConnectError("refused")
        self.model.begun(call)
        answered = self.model.asked(call) if size is None else None
        if not isinstance(self.app, StandIn):
            serving = partial(serve, self.app, call, size, connection)
            task = self.run(self._checked(serving, answered))
        elif size is None:
            task = self.run(self._checked(partial(self.app.answer, call), answered))
        else:
            raise httpx.ReadError("the connection broke")
        ended = self._loop.create_future()

        def end(_: object) -> None:
            if not ended.done():
                ended.set_result(None)

        task.add_done_callback(end)
        try:
            await ended
        except asyncio.CancelledError:
            connection.end(taken=False)  # the client has left
            raise
        if task.cancelled():
            raise httpx.ReadError("the connection was reset")
        error = task.exception()
        if isinstance(error, Exception):
            self.errors.append(error)
            return Reply(500, {})
        return task.result()

    async def _checked(
        self, serving: Callable[[], Coroutine[Any, Any, Reply]], answered: Answered | None
    ) -> Reply:
        """Returns the process's answer, which the model sees at this moment: whoever asked may have
        stopped.
        """
        reply = await serving()
        if answered is not None and reply.is_success:
            try:
                answered(reply)
            except Broken as broken:
                self._story.say(f"BROKEN by {self.name}: {broken}")
                self.errors.append(broken)
        return reply

    async def refuse(self, call: Call) -> Reply:
        """Refuses a request, as a server does that has too many. Raises ConnectError."""
        app: Any = self.app
        if app is None:
            raise httpx.ConnectError("refused")
        self.model.begun(call)
        load = app.state.load
        limit = load.request_limit
        load.request_limit = 0
        try:
            # It waits for nothing, so that no other request meets this limit.
            return await serve(app, call, connection=Connection())
        finally:
            load.request_limit = limit

    async def ask(self, method: str, path: str) -> Reply:
        """Asks the process from outside of the simulated network."""
        return await self.answer(Call.of(method, f"http://it{path}", {}, b""), None, Connection())


async def serve(
    app: App, call: Call, size: int | None = None, connection: Connection | None = None
) -> Reply:
    """Calls an app as a server does; with `size` the connection breaks after so many bytes of the
    body.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "headers": [(name.encode(), value.encode()) for name, value in call.headers.items()],
        "scheme": "http",
        "path": unquote(call.path),
        "raw_path": call.path.encode(),
        "query_string": call.query.encode(),
        "server": (call.host.partition(":")[0], 80),
        "client": ("client", 1),
        "root_path": "",
        "extensions": {"rlhf": {"connection": connection}},
    }
    arriving = [
        {"type": "http.request", "body": call.content[:size], "more_body": size is not None}
    ]
    answered = asyncio.Event()
    status = 0
    headers: dict[str, str] = {}
    pieces: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if arriving:
            return arriving.pop()
        if size is None:
            await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            for name, value in message.get("headers", []):
                headers[name.decode().lower()] = value.decode()
            return
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            answered.set()

    with contextlib.suppress(ClientDisconnect):
        await app(scope, receive, send)
    return Reply(status or 500, headers, b"".join(pieces))


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


class AnswerLost(httpx.ReadError):
    """The connection broke while the answer was on it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__("lost")
        self.reply = reply


class Net:
    """The nodes of a run, by the hosts of their URLs, and what is between them."""

    def __init__(self, loop: VirtualLoop, chance: Chance, story: Story) -> None:
        self.loop = loop
        self.chance = chance
        self.story = story
        self.nodes: dict[str, Node] = {}
        self._names: dict[str, Node] = {}
        self.lives = 0
        """Lives of the process "", which is no node: the trainer's."""
        self.is_copied: Callable[[Call], bool] = lambda _: True
        """Whether the network may repeat a request."""
        self.comes_again_s: Callable[[Call], float] = lambda _: 0.0
        """After how many seconds a copy of a request arrives in any case; 0 if none does."""
        self.is_noticed: Callable[[Call], bool] = lambda _: False
        """Whether a server knows of a request that it refuses, or whose client leaves it while it is
        on its way: it waited at the server."""
        self.holds: Callable[[str, Call, bool], bool] = lambda *_: False
        """Whether it never carries a process's request, or the answer to it (True)."""
        self._cuts: list[tuple[str, str]] = []
        """Pairs of machines that do not reach each other; "*" is every machine."""

    def add(self, host: str, node: Node) -> None:
        self.nodes[host] = node
        self._names[node.name] = node

    def named(self, name: str) -> Node | None:
        """Returns the node of a process; None for the trainer's."""
        return self._names.get(name)

    def life_of(self, name: str) -> int:
        """Returns the number of a process's life."""
        node = self.named(name)
        return self.lives if node is None else node.lives

    def copies(self) -> "list[asyncio.Task[Any]]":
        """Returns the copies of requests that are still on their way."""
        return self.loop.tasks_of(_WIRES)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Lets two machines not reach each other for a while."""
        pair = one, other
        self._cuts.append(pair)
        self.story.fault("partition", f"{one} and {other}")

        def heal() -> None:
            self._cuts.remove(pair)
            self.story.say(f"{one} and {other} reach each other again")

        self.loop.call_later(seconds, heal)

    def is_cut(self, owner: str, node: Node) -> bool:
        """Returns whether a process does not reach a node."""
        ends = {self._machine(owner), node.machine, "*"}
        is_cut = any(ends.issuperset(pair) for pair in self._cuts)
        return is_cut and not self.is_local(owner, node)

    def is_local(self, owner: str, node: Node) -> bool:
        """Returns whether a process and a node are on one machine."""
        return self._machine(owner) == node.machine

    def _machine(self, name: str) -> str:
        node = self.named(name)
        return (name or "trainer") if node is None else node.machine

    def deliver_later(
        self, node: Node, call: Call, delay_s: float, size: int | None = None
    ) -> None:
        """Delivers a copy of a request whose answer nobody reads, or so much of its body as arrived
        before its client left.
        """
        connection = Connection()
        if size is not None:
            connection.end(taken=False)

        async def deliver() -> None:
            await asyncio.sleep(delay_s)
            with contextlib.suppress(httpx.TransportError):
                await node.answer(call, size, connection)

        context = contextvars.Context()
        context.run(process.set, _WIRES)
        self.loop.create_task(deliver(), context=context)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Inside the block, the clients that are made are those of this network, and services answer
        a handler's mistake to it.
        """

        def on_crash(request: Any, error: Exception) -> ServiceError:
            node = self.named(process.get())
            assert node is not None
            node.errors.append(error)
            return crash(request, error)

        crash = errors._crash
        with (
            patch.object(base, "Network", lambda: Wire(self)),
            patch.object(errors, "_crash", on_crash),
        ):
            yield


class Wire(Network):
    """The connections of one client, in the process that makes it."""

    def __init__(self, net: Net) -> None:
        # Not that of `Network`, which reads certificates.
        self._net = net
        self._owner = process.get()
        self._life = net.life_of(self._owner)

    async def exchange(self, sent: Sent) -> Reply:
        call = Call.of(sent.method, sent.url, sent.headers, sent.content)
        return await self._carry(call)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = dict(request.headers.items())
        call = Call.of(request.method, str(request.url), headers, request.content)
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                reply = await self._carry(call)
        except TimeoutError:
            raise httpx.ReadTimeout("no byte") from None
        except AnswerLost as lost:
            size = self._net.chance.rng.randrange(len(lost.reply.content) + 1)
            cut = _CutBody(lost.reply.content[:size])
            return httpx.Response(lost.reply.status_code, headers=lost.reply.headers, stream=cut)
        whole = httpx.ByteStream(reply.content)
        return httpx.Response(reply.status_code, headers=reply.headers, stream=whole)

    async def aclose(self) -> None:
        """Nothing is open."""

    async def _carry(self, call: Call) -> Reply:
        net = self._net
        if self._life != net.life_of(self._owner):
            raise httpx.ConnectError("the process has ended")
        rng = net.chance.rng
        node = net.nodes[call.host]
        # On one machine few calls are lost.
        spared = net.is_local(self._owner, node) and rng.random() < 0.9
        kind = "" if spared else net.chance.draw()
        if kind in ("repeated", "late copy") and not net.is_copied(call):
            kind = ""
        if kind:
            net.story.fault(kind, f"{call} to {node.name}")
        try:
            await asyncio.sleep(rng.uniform(0.0005, 30.0 if kind == "slow" else 0.01))
        except asyncio.CancelledError:
            if kind == "slow" and net.is_noticed(call) and not net.is_cut(self._owner, node):
                net.deliver_later(node, call, 0.0, size=rng.randrange(len(call.content) + 1))
            raise
        if net.is_cut(self._owner, node) or net.holds(self._owner, call, False):
            await asyncio.sleep(1e6)
        if kind == "lost request":
            raise httpx.ReadError("lost")
        if kind == "busy":
            return (
                await node.refuse(call)
                if net.is_noticed(call)
                else Reply(503, {"retry-after": "0.1"})
            )
        if kind == "repeated":
            net.deliver_later(node, call, 0.0)
        if kind == "late copy":
            net.deliver_later(node, call, rng.uniform(1.0, 120.0))
        again_s = net.comes_again_s(call)
        if again_s:
            net.deliver_later(node, call, again_s)
        connection = Connection()
        if kind == "cut request":
            await node.answer(call, rng.randrange(len(call.content) + 1), connection)
            raise httpx.ReadError("the connection broke")
        reply = await node.answer(call, None, connection)
        if kind == "lost answer":
            connection.end(taken=False)
            raise AnswerLost(reply)
        try:
            is_silent = kind == "silent" or net.is_cut(self._owner, node)
            if is_silent or net.holds(self._owner, call, True):
                await asyncio.sleep(1e6)
            await asyncio.sleep(rng.uniform(0.0005, 0.01))
        except asyncio.CancelledError:
            connection.end(taken=False)
            raise
        connection.end(taken=True)
        return reply


class _CutBody(httpx.AsyncByteStream):
    """A body whose connection breaks."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        raise httpx.ReadError("the connection broke")
