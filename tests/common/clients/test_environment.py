"""With several nodes, the environment client spreads episodes and replays those of a lost node on
another."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from common.clients import base, environment
from common.clients.base import Client
from common.clients.environment import EnvironmentClient
from common.clients.rollout import RolloutClient
from common.settings.sections import EnvironmentSection
from common.wire.schemas import EpisodeRequest
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from services.environment.template import Template
from tests.support.environments.environments import BASE, AnsweringEngine, request_for
from tests.support.environments.own_environments import INSISTS
from tests.support.processes.waits import comes


class Road(httpx.AsyncBaseTransport):
    """The connection to a node. When it is shut, pending and new calls fail, or hang as with a
    stopped process."""

    def __init__(self, inner: httpx.ASGITransport) -> None:
        self._inner, self.shut, self.hangs = inner, asyncio.Event(), False
        self.posts = self.refusals = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.posts += request.method == "POST"
        if request.method == "DELETE" and self.refusals:
            self.refusals -= 1
            return httpx.Response(500, request=request)
        answer = asyncio.create_task(self._inner.handle_async_request(request))
        shut = asyncio.create_task(self.shut.wait())
        try:
            await asyncio.wait({answer, shut}, return_when=asyncio.FIRST_COMPLETED)
            if not self.shut.is_set():
                return await answer
            if self.hangs:
                await asyncio.Event().wait()
            raise httpx.ReadError("the node is gone")
        finally:
            shut.cancel()


class Nodes:
    """An environment-server with several nodes, in this process."""

    def __init__(self) -> None:
        self.services: list[EpisodeService] = []
        self.roads: list[Road] = []
        self.open = asyncio.Event()
        """The engines do not answer until this is set."""
        self.client: EnvironmentClient

    def running(self) -> list[int]:
        return [service.stats()["running"] for service in self.services]


@asynccontextmanager
async def serving(count: int) -> AsyncIterator[Nodes]:
    nodes, engine = Nodes(), AnsweringEngine(lambda _: "ok")
    app = engine.app()

    async def waits(scope, receive, send):  # type: ignore[no-untyped-def]
        await nodes.open.wait()
        await app(scope, receive, send)

    stop = engine.tokenizer.eos_token_id
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            RolloutClient("rollout-server", BASE, transport=httpx.ASGITransport(waits))
        )
        for _ in range(count):
            service = EpisodeService(
                EnvironmentSection(name=INSISTS),
                Template(engine.tokenizer, [stop]),
                router,
                stop_token_ids=[stop],
            )
            served = create_environment_app(service, nodes=count)
            await stack.enter_async_context(served.router.lifespan_context(served))
            nodes.services.append(service)
            nodes.roads.append(Road(httpx.ASGITransport(served)))
        nodes.client = EnvironmentClient(
            "environment-server",
            BASE,
            transport=nodes.roads[0],
            node=lambda i: Client(f"environment-server-{i}", BASE, transport=nodes.roads[i]),
        )
        await stack.enter_async_context(nodes.client)
        yield nodes


def numbered(i: int) -> EpisodeRequest:
    return request_for(INSISTS, n=2).model_copy(update={"request_id": f"r{i}"})


async def test_episodes_are_spread_over_the_nodes() -> None:
    async with serving(3) as nodes:
        calls = [asyncio.create_task(nodes.client.episodes(numbered(i))) for i in range(9)]
        await comes(lambda: nodes.running() == [6, 6, 6])
        nodes.open.set()
        found = [episode for call in calls for episode in await call]
        assert Counter(episode.status for episode in found) == {"ok": 18}
        assert len({episode.id for episode in found}) == 18


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
async def test_episodes_of_a_lost_node_move_to_another(
    lost: int, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_PROBE_S", 0.01)
    monkeypatch.setattr(Client, "unhealthy_reason", _quick)
    async with serving(2) as nodes:
        calls = [asyncio.create_task(nodes.client.episodes(numbered(i))) for i in range(4)]
        await comes(lambda: nodes.running() == [4, 4])
        kept = nodes.services[1 - lost]
        nodes.roads[lost].hangs = hangs
        nodes.roads[lost].shut.set()
        await comes(lambda: kept.stats()["running"] == 8)
        nodes.roads[lost].refusals = 1
        nodes.roads[
            lost
        ].shut.clear()  # the node is back, and ends the episodes that nobody waits for
        await comes(lambda: not nodes.services[lost].stats()["running"])
        later = asyncio.create_task(nodes.client.episodes(numbered(9)))
        await comes(lambda: nodes.services[lost].stats()["running"] == 2)
        nodes.open.set()
        found = [episode for call in [*calls, later] for episode in await call]
        assert Counter(episode.status for episode in found) == {"ok": 10}
        assert len({episode.id for episode in found}) == 10
        assert kept.stats()["episodes"]["ok"] == 8


async def test_the_client_waits_when_all_nodes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PROBE_S", 0.01)
    monkeypatch.setattr(Client, "unhealthy_reason", _quick)
    async with serving(2) as nodes:
        nodes.open.set()
        await nodes.client.episodes(numbered(0))
        for road in nodes.roads:
            road.shut.set()
        call = asyncio.create_task(nodes.client.episodes(numbered(1)))
        await comes(lambda: all(node.lost for node in nodes.client._nodes))
        nodes.roads[1].shut.clear()
        nodes.roads[0].shut.clear()
        assert [episode.status for episode in await call] == ["ok", "ok"]


async def test_a_request_is_repeated_while_its_node_is_healthy_and_then_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Episodes may wait for a slot longer than the client's deadline."""
    health = [None, None, "it is ending"]

    async def reason(client: Client) -> str | None:
        return health.pop(0)

    monkeypatch.setattr(environment, "_SLACK_S", 0.05 - 3 * numbered(0).limits.deadline_s)
    monkeypatch.setattr(Client, "unhealthy_reason", reason)
    async with serving(1) as nodes:
        with pytest.raises(base.Unreachable):
            await nodes.client.episodes(numbered(0))
        await comes(lambda: nodes.running() == [0])
        call = asyncio.create_task(nodes.client.episodes(numbered(1)))
        health += [None] * 1000
        await comes(lambda: len(health) < 999)
        nodes.open.set()
        assert [episode.status for episode in await call] == ["ok", "ok"]


async def test_a_cancelled_request_is_ended_on_its_node() -> None:
    async with serving(2) as nodes:
        calls = [asyncio.create_task(nodes.client.episodes(numbered(i))) for i in range(2)]
        await comes(lambda: nodes.running() == [2, 2])
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        await comes(lambda: nodes.running() == [2, 0])
        nodes.open.set()
        await calls[0]


async def _quick(client: Client) -> str | None:
    """Asks `/health` like the client, but with less patience."""
    try:
        async with asyncio.timeout(0.2):
            return None if (await client.http.get("/health")).is_success else "unhealthy"
    except (TimeoutError, httpx.HTTPError) as error:
        return str(error) or "no answer"
