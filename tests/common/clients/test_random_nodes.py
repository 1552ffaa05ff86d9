"""Which node plays the episodes of a request: over nodes that are lost and come back, to the second,
on a virtual clock.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from common.clients.base import Client, Unreachable
from common.clients.environment import EnvironmentClient
from common.errors import ServiceError
from common.wire import codec
from common.wire.schemas import (
    Episode,
    EpisodeLimits,
    EpisodeRequest,
    Episodes,
    EpisodeSampling,
    EpisodeTask,
)
from tests.simulation.virtual_time import simulated


class Node(httpx.AsyncBaseTransport):
    """A node of the environment-server: a request that comes again joins the one that runs."""

    def __init__(self, nodes: "Nodes", number: int) -> None:
        self.nodes = nodes
        self.number = number
        self.running: dict[str, asyncio.Task[bytes]] = {}
        self.posts: list[tuple[float, str]] = []
        self.probes: list[float] = []
        self.deleted: list[tuple[float, str, int]] = []
        self.delete_statuses: list[int] = []
        self.health = 200
        self.shut = ""
        """How it cannot be reached: `refuses` or `hangs`; empty if it can."""
        self.turn = asyncio.Event()
        """Is set, and replaced, when that changes."""

    def becomes(self, shut: str) -> None:
        self.shut = shut
        self.turn.set()
        self.turn = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        now = self.nodes.now
        method = request.method
        if request.url.path == "/health":
            self.probes.append(now)
        if method == "POST":
            self.posts.append((now, json.loads(request.content)["request_id"]))
        answer = asyncio.create_task(self._answer(request))
        while self.shut != "refuses":
            turned = asyncio.create_task(self.turn.wait())
            # A process that was stopped goes on with what it has.
            waits = {turned} if self.shut else {turned, answer}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            turned.cancel()
            if answer.done() and not self.shut:
                return answer.result()
        answer.cancel()
        raise httpx.ConnectError("Connection refused")

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        match request.method, request.url.path:
            case "GET", "/health":
                return httpx.Response(self.health)
            case "GET", "/stats":
                return httpx.Response(200, json={"nodes": len(self.nodes.all)})
            case "DELETE", path:
                return self._delete(path.rpartition("/")[2])
        assert request.url.path == "/episodes"
        assert request.headers["accept"] == codec.MSGPACK
        body = json.loads(request.content)
        name = body["request_id"]
        if name not in self.running:
            self.running[name] = asyncio.create_task(self._play(name, body["n"]))
        return httpx.Response(200, content=await asyncio.shield(self.running[name]))

    def _delete(self, name: str) -> httpx.Response:
        status = self.delete_statuses.pop(0) if self.delete_statuses else 200
        if status == 200:
            task = self.running.pop(name, None)
            if task is not None:
                task.cancel()
            else:
                status = 404
        self.deleted.append((self.nodes.now, name, status))
        return httpx.Response(status, json={"error": {"code": "x", "message": "y"}})

    async def _play(self, name: str, count: int) -> bytes:
        await asyncio.sleep(self.nodes.seconds())
        found = [
            Episode(f"{name}-{number}", "ok", "done", 1.0, f"node {self.number}", [])
            for number in range(count)
        ]
        del self.running[name]
        return codec.encode(Episodes(found))


class Nodes:
    """All nodes, and the client of a trainer."""

    def __init__(self, count: int, seconds: Callable[[], float]) -> None:
        self.seconds = seconds
        self.all: list[Node] = []
        self.all += [Node(self, number) for number in range(count)]
        self.made: list[int] = []

        def client_of(number: int) -> Client:
            self.made.append(number)
            return Client(f"node-{number}", f"http://node-{number}", transport=self.all[number])

        self.client = EnvironmentClient(
            "environment", "http://node-0", transport=self.all[0], node=client_of
        )

    @property
    def now(self) -> float:
        return round(asyncio.get_running_loop().time(), 3)

    async def asked(self, name: str) -> list[Episode]:
        request = EpisodeRequest(
            request_id=name,
            n=2,
            task=EpisodeTask(env="e"),
            sampling=EpisodeSampling(max_new_tokens=1),
            limits=EpisodeLimits(deadline_s=100.0),
        )
        found = await self.client.episodes(request)
        assert [each.id for each in found] == [f"{name}-0", f"{name}-1"]
        return found

    def begin(self, name: str) -> asyncio.Task[list[Episode]]:
        return asyncio.create_task(self.asked(name))


def played(
    seed: int, count: int, play: Callable[[Nodes], Coroutine[Any, Any, None]], seconds: float = 60.0
) -> None:
    with simulated(seed) as loop:

        async def main() -> None:
            nodes = Nodes(count, lambda: seconds)
            try:
                await asyncio.wait_for(play(nodes), 100_000.0)
            finally:
                await nodes.client.close()

        try:
            loop.run_until_complete(main())
        finally:
            loop.end_tasks()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_requests_go_to_the_node_with_the_fewest(count: int) -> None:
    async def play(nodes: Nodes) -> None:
        calls = []
        for number in range(11):
            calls.append(nodes.begin(f"r{number}"))
            await asyncio.sleep(0.1)
        posts = [len(node.posts) for node in nodes.all]
        assert sum(posts) == 11
        assert max(posts) - min(posts) <= 1
        assert nodes.made == [*range(1, count)], "the first node is known already"
        # One node is not watched: there is no other to move to.
        await asyncio.sleep(3.0)
        assert [node.probes for node in nodes.all] == ([[2.0, 4.0]] * count if count > 1 else [[]])
        for call in calls:
            await call
        after = nodes.now
        await asyncio.sleep(30.0)
        assert all(at <= after + 2.0 for node in nodes.all for at in node.probes), "nobody waits"

    played(0, count, play)


@pytest.mark.parametrize(("shut", "moved_at"), [("refuses", 6.0), ("hangs", 21.0)])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("statuses", [[200, 200], [500, 200, 200], [404, 200]])
def test_requests_of_a_lost_node_move_after_three_probes_and_end_there_later(
    shut: str, moved_at: float, lost: int, statuses: list[int]
) -> None:
    async def play(nodes: Nodes) -> None:
        calls = [nodes.begin(f"r{number}") for number in range(4)]
        await asyncio.sleep(0.1)
        gone = nodes.all[lost]
        kept = nodes.all[1 - lost]
        names = {name for _, name in gone.posts}
        assert len(names) == len(kept.posts) == 2
        gone.becomes(shut)
        await asyncio.sleep(moved_at - 0.2)
        assert len(kept.posts) == 2, "it may be only a short while"
        await asyncio.sleep(0.2)
        assert {name for _, name in kept.posts[2:]} == names
        assert {at for at, _ in kept.posts[2:]} == {moved_at}
        # New requests do not go there.
        calls.append(nodes.begin("later"))
        await asyncio.sleep(0.1)
        assert kept.posts[-1][1] == "later"

        gone.delete_statuses = [*statuses]
        assert set(gone.running) == names
        gone.becomes("")
        await asyncio.sleep(12.0)
        answered = [(name, status) for _, name, status in gone.deleted]
        assert len(answered) == len(statuses)
        assert {name for name, _ in answered} == names
        ended = [name for name, status in answered if status == 200]
        assert set(gone.running) == names - {*ended}
        calls.append(nodes.begin("last"))
        await asyncio.sleep(0.1)
        assert gone.posts[-1][1] == "last", "it has the fewest again"
        for call in calls[:4]:
            assert {each.answer for each in await call} == {f"node {1 - lost}"}
        for call in calls[4:]:
            await call

    played(1, 2, play)


@pytest.mark.parametrize("probes", [1, 2])
def test_a_node_that_is_away_for_a_short_while_keeps_its_requests(probes: int) -> None:
    async def play(nodes: Nodes) -> None:
        calls = [nodes.begin(f"r{number}") for number in range(4)]
        await asyncio.sleep(0.1)
        node = nodes.all[1]
        for _ in range(3):
            node.becomes("refuses")
            await asyncio.sleep(2.0 * probes)
            node.becomes("")
            await asyncio.sleep(2.0)
        for call in calls:
            await call
        assert {name for _, name in nodes.all[0].posts} == {"r0", "r2"}
        assert node.deleted == []

    played(2, 2, play)


def test_when_all_nodes_are_lost_they_are_waited_for() -> None:
    async def play(nodes: Nodes) -> None:
        calls = [nodes.begin(f"r{number}") for number in range(2)]
        await asyncio.sleep(0.1)
        for node in nodes.all:
            node.becomes("refuses")
        await asyncio.sleep(100.0)
        for node in nodes.all:
            node.becomes("")
        for call in calls:
            await call
        assert [{name for _, name in node.posts} for node in nodes.all] == [{"r0"}, {"r1"}]
        assert all(node.deleted == [] for node in nodes.all)

    played(3, 2, play)


@pytest.mark.parametrize("cancels", ["at its node", "after it has moved"])
def test_a_request_that_is_cancelled_ends_on_its_node(cancels: str) -> None:
    async def play(nodes: Nodes) -> None:
        calls = [nodes.begin(f"r{number}") for number in range(2)]
        await asyncio.sleep(0.1)
        if cancels == "after it has moved":
            nodes.all[1].becomes("refuses")
            await asyncio.sleep(10.0)
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        where = nodes.all[0 if cancels == "after it has moved" else 1]
        assert [name for _, name, _ in where.deleted] == ["r1"]
        assert "r1" not in where.running
        nodes.all[1].becomes("")
        await calls[0]
        assert not nodes.all[1].running

    played(4, 2, play)


@pytest.mark.parametrize("end", ["refuses", "is unwell"])
def test_a_request_waits_for_a_slot_as_long_as_its_node_is_healthy(end: str) -> None:
    async def play(nodes: Nodes) -> None:
        # Three times the deadline of an episode, and a little, are the time of one call.
        call = nodes.begin("r0")
        await asyncio.sleep(900.0)
        node = nodes.all[0]
        assert [round(at) for at, _ in node.posts] == [0, 330, 660]
        if end == "refuses":
            node.becomes(end)
        else:
            node.health = 503
        with pytest.raises(Unreachable):
            await call
        assert nodes.now == pytest.approx(990.0, abs=2.5)
        # Nobody waits for its episodes any more.
        deleted = [name for _, name, _ in node.deleted]
        assert deleted == ([] if end == "refuses" else ["r0"])

    played(5, 1, play, seconds=5000.0)


@pytest.mark.parametrize("served", [(None, False), (True, True), (True, False)])
async def test_what_the_environment_says_of_its_rewards(served: tuple[bool | None, bool]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/environments"
        return httpx.Response(200, json=[{"has_reward": served[0], "gives_verdicts": served[1]}])

    transport = httpx.MockTransport(answer)
    async with EnvironmentClient("environment", "http://e", transport=transport) as client:
        assert await client.rewards() == served


@pytest.mark.parametrize("seed", range(8))
def test_every_request_is_answered_and_nothing_goes_on_that_nobody_waits_for(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 4)

    async def play(nodes: Nodes) -> None:
        nodes.seconds = lambda: draw.choice([1.0, draw.uniform(0, 40)])
        ends = False

        async def faults(node: Node) -> None:
            while not ends:
                await asyncio.sleep(draw.expovariate(1 / 40))
                node.becomes(draw.choice(["refuses", "hangs"]))
                await asyncio.sleep(draw.choice([1.0, 5.0, draw.uniform(5, 60)]))
                node.becomes("")

        disturbed = [asyncio.create_task(faults(node)) for node in nodes.all]
        calls: list[asyncio.Task[list[Episode]]] = []
        given_up: set[str] = set()
        for number in range(40):
            calls.append(nodes.begin(f"r{number}"))
            await asyncio.sleep(draw.choice([0.0, draw.uniform(0, 10)]))
            if draw.random() < 0.2:
                draw.choice(calls).cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        for number, each in enumerate(found):
            if isinstance(each, asyncio.CancelledError):
                given_up.add(f"r{number}")
            else:
                assert not isinstance(each, ServiceError), each
        ends = True
        await asyncio.gather(*disturbed)
        # What moved is ended on the node that it moved from as soon as that is back.
        await asyncio.sleep(120.0)
        for node in nodes.all:
            assert {*node.running} <= given_up, "its node could not be reached then"
        posts = Counter(name for node in nodes.all for name in {name for _, name in node.posts})
        assert posts.total() >= 40 - len(given_up)

    played(seed, count, play)
