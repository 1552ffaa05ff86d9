"""The health of services and rollout nodes, from what they answer."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from common.clients.base import Client
from common.process.topology import (
    DATA,
    ENVIRONMENT,
    REPLAY,
    REWARD,
    ROLLOUT,
    TRAINER,
    Topology,
)
from common.process.watchdog import RankWhere
from common.settings.config import Config
from trainer.diagnosis import health, live
from trainer.diagnosis.facts import Facts
from trainer.diagnosis.health import ROUTER, Health, ServiceHealth

STATS: dict[str, Any] = {
    DATA: {"epoch": 1, "position": 40, "total_available": 100, "load": {"requests": 3}},
    REWARD: {"graded": {"ok": 5, "error": 0}, "unfinished": 7, "load": {"requests": 1}},
    REPLAY: {"size": 6, "capacity": 90, "fresh": 2, "load": {"requests": 0}},
}
LOADS = [
    {"num_running_reqs": 3, "num_waiting_reqs": 1, "gen_throughput": 10.0},
    {"num_running_reqs": 4, "num_waiting_reqs": 0, "gen_throughput": 20.0},
]
Answer = Callable[[str, str], Any]
"""What (service, path) is answered with: JSON, a response, or an error that is raised."""


class Tasks:
    """Answers the calls of a `Health`; a test changes single answers."""

    def __init__(self) -> None:
        self.state = "ready"
        self.registered = True
        self.other: dict[str, Any] = {}
        """What is answered instead, by `service/path` or the service."""

    def __call__(self, service: str, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        is_engine = request.url.port == Config().rollout.engine_port
        name = f"{service} engine" if is_engine else service
        found = self.other.get(f"{name}{path}", self.other.get(name))
        if isinstance(found, Exception):
            raise found
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(200, json=self._usual(service, path) if found is None else found)

    def _usual(self, service: str, path: str) -> Any:
        if path == "/where":
            return {"pid": os.getpid()}
        if path == "/workers":
            return {"workers": [{"is_healthy": True}, {"is_healthy": False}]}
        if path == "/status":
            report = {"state": self.state, "version": 8, "detail": "why"}
            return {"report": report, "registered": self.registered}
        return {"/v1/loads": {"loads": LOADS}, "/stats": STATS.get(service)}.get(path, {})


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    found = Tasks()

    def client(name: str, url: str, **options: Any) -> Client:
        return Client(name, url, transport=httpx.MockTransport(partial(found, name)), **options)

    for module in (health, live):
        monkeypatch.setattr(module, "Client", client)
    monkeypatch.setattr(health, "_FRESH_S", 0.0)
    return found


def asked(
    *changes: Callable[[], None], where: dict[str, Any] | None = None
) -> list[dict[str, ServiceHealth]]:
    """Returns the health by name, at first and after each change."""

    async def ask() -> list[dict[str, ServiceHealth]]:
        made = Health(Config(), Topology(), lambda: 2, lambda: 9, headers={})
        found = []
        async with made.running():
            for change in (lambda: None, *changes):
                change()
                answer = await made.ask()
                found.append({each.name: each for each in answer})
            if where is not None:
                where.update(await made.where())
            clients = [each.client for each in made._targets.values()]
            clients += [each.engine for each in made._targets.values() if each.engine]
        assert all(client.http.is_closed for client in clients)
        return found

    return asyncio.run(ask())


def test_the_numbers_of_healthy_tasks_are_those_that_they_answer(tasks: Tasks) -> None:
    where: dict[str, Any] = {}
    (found,) = asked(where=where)
    nodes = [f"{ROLLOUT}-0", f"{ROLLOUT}-1"]
    assert list(found) == [TRAINER, *nodes, ROUTER, DATA, REWARD, REPLAY]
    assert {each.state for each in found.values()} == {"healthy"}
    assert {each.problem for each in found.values()} == {""}
    assert found[TRAINER].version == 9
    for name in nodes:
        node = found[name]
        assert (node.version, node.reported) == (8, "ready")
        assert (node.running, node.waiting, node.tokens_per_s) == (7, 1, 30.0)
    counts = {name: (found[name].running, found[name].waiting) for name in (DATA, REWARD, REPLAY)}
    assert counts == {DATA: (2, None), REWARD: (0, 7), REPLAY: (0, 2)}
    assert "1 of 2" in found[ROUTER].text
    assert {name: each.pid for name, each in where.items()} == dict.fromkeys(
        [*nodes, DATA, REWARD, REPLAY], os.getpid()
    )


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("hung", [0, 1200])
def test_every_node_is_asked_at_its_own_address(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, nodes: int, hung: int
) -> None:
    """The first node of the environment-server says how many there are."""
    config = Config()
    config.environment.name = "calculator"
    topology = Topology(group="run")
    made: Any = vars(health)["Client"]
    urls: dict[str, list[str]] = {}

    def client(name: str, url: str, **options: Any) -> Client:
        urls.setdefault(name, []).append(url)
        tasks.other[f"{name}/stats"] = STATS.get(name) or {
            "nodes": nodes,
            "episodes": {"ok": 5, "died": 0},
            "hung_calls": hung,
            "hung_calls_limit": 4000,
            "running": 3,
        }
        found: Client = made(name, url, **options)
        return found

    monkeypatch.setattr(health, "Client", client)

    async def ask() -> list[ServiceHealth]:
        asked = Health(config, topology, lambda: nodes, lambda: 9, headers={})
        async with asked.running():
            await asked.ask()
            return await asked.ask()

    found = {each.name: each for each in asyncio.run(ask())}
    environment = [f"{ENVIRONMENT}-{node}" for node in range(nodes)]
    assert [name for name in found if name.startswith(ENVIRONMENT)] == environment
    for name in environment:
        assert (found[name].state, found[name].running) == ("healthy", 3)
        assert found[name].text.startswith("episodes: 5 ok")
        assert ("1,200 calls are stuck" in found[name].text) == (hung > 0)
        assert ("4,000" in found[name].text) == (hung > 0)
    for name in [*environment, *(f"{ROLLOUT}-{node}" for node in range(nodes))]:
        assert all(f"//{name}.run:" in url for url in urls[name]), name
    ports = [url.rpartition(":")[2] for url in urls[f"{ROLLOUT}-0"]]
    assert sorted(map(int, ports)) == sorted(
        [config.rollout.engine_port, config.rollout.agent_port]
    )


@pytest.mark.parametrize("status", [500, 401])
def test_a_service_is_asked_for_its_health_before_its_numbers(tasks: Tasks, status: int) -> None:
    tasks.other[f"{DATA}/health"] = httpx.Response(status, json={"reason": "it fills", "lost": 1})
    (found,) = asked()
    state = {500: ("warning", "not_ready"), 401: ("dead", "unauthorized")}[status]
    assert (found[DATA].state, found[DATA].problem) == state
    assert ("it fills" in found[DATA].text) == (status == 500)
    assert found[DATA].running is None


def test_the_state_of_a_node_is_that_of_its_agent_and_of_the_router(tasks: Tasks) -> None:
    def now(state: str, registered: bool = True) -> Callable[[], None]:
        def change() -> None:
            tasks.state = state
            tasks.registered = registered

        return change

    changes = [now("ready", False), now("updating"), now("starting"), now("failed")]
    ready, *others = [found[f"{ROLLOUT}-0"] for found in asked(*changes)]
    assert (ready.state, ready.problem, ready.running) == ("healthy", "", 7)
    seen = [(node.reported, node.state, node.problem, node.running) for node in others]
    assert seen == [
        ("ready", "warning", "not_ready", 7),
        ("updating", "healthy", "", None),
        ("starting", "warning", "not_ready", None),
        ("failed", "dead", "error", None),
    ]


@pytest.mark.parametrize(
    ("service", "answer", "state", "problem"),
    [
        (DATA, httpx.ConnectError("Connection refused"), "dead", "refused"),
        (DATA, httpx.ReadTimeout("timed out"), "dead", "silent"),
        (DATA, httpx.Response(401, json={}), "dead", "unauthorized"),
        (f"{DATA}/health", httpx.Response(503, json={"reason": "loading"}), "warning", "not_ready"),
        (
            f"{DATA}/health",
            httpx.Response(503, json={"reason": "gone", "lost": True}),
            "warning",
            "lost",
        ),
        (f"{DATA}/health", httpx.Response(503, text="no JSON"), "warning", "not_ready"),
        (f"{DATA}/stats", {}, "dead", "error"),
        (f"{DATA}/where", httpx.Response(503, json={}), "healthy", ""),
        (f"{DATA}/stats", httpx.Response(507, json={}), "dead", "disk_full"),
        (ROUTER, {"workers": []}, "warning", ""),
        (f"{ROLLOUT}-1 engine", httpx.ConnectError("Connection refused"), "dead", "refused"),
    ],
)
def test_what_keeps_a_task_from_serving_has_a_kind(
    tasks: Tasks, service: str, answer: Any, state: str, problem: str
) -> None:
    tasks.other[service] = answer
    where: dict[str, Any] = {}
    (found,) = asked(where=where)
    name = service.partition("/")[0].removesuffix(" engine")
    changed = found.pop(name)
    assert (changed.state, changed.problem) == (state, problem)
    assert changed.of_engine == service.endswith("engine")
    assert changed.text
    assert {each.state for each in found.values()} == {"healthy"}
    is_told = state != "dead" and name != ROUTER and not service.endswith("/where")
    assert (name in where) == is_told


@pytest.mark.parametrize(
    ("path", "limits", "task", "state"),
    [
        ("/v1/loads", {"PATIENCE_S": 60.0, "_ENGINE_PATIENCE_S": 0.05}, f"{ROLLOUT}-0", "warning"),
        ("/health", {"PATIENCE_S": 0.05}, DATA, "dead"),
    ],
)
def test_a_task_that_takes_too_long_is_silent(
    tasks: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    limits: dict[str, float],
    task: str,
    state: str,
) -> None:
    for name, limit_s in limits.items():
        monkeypatch.setattr(health, name, limit_s)
    answer = httpx.MockTransport.handle_async_request

    async def late(self: httpx.MockTransport, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(600 * (request.url.path == path))
        return await answer(self, request)

    monkeypatch.setattr(httpx.MockTransport, "handle_async_request", late)
    (found,) = asked()
    assert (found[task].state, found[task].problem) == (state, "silent")
    assert found[task].of_engine == (task != DATA)


def test_the_time_in_a_state_begins_with_it(tasks: Tasks) -> None:
    def fail() -> None:
        tasks.other[DATA] = httpx.ConnectError("Connection refused")

    first, second, third = [found[DATA] for found in asked(lambda: None, fail)]
    assert first.since_s <= second.since_s
    assert third.since_s <= second.since_s


def test_a_living_run_is_asked_for_its_ranks_and_its_services(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_AGAIN_S", 0.0)
    in_collective = (
        'thread MainThread:\n  File "trainer/loop.py", line 3, in step\n'
        '  File "x/torch/distributed/c10d_logger.py", line 83, in wrapper\n'
        '  File "x/torch/distributed/distributed_c10d.py", line 9, in all_reduce\n'
        'thread other:\n  File "x/torch/distributed/distributed_c10d.py", line 9, in barrier\n'
    )
    where = [
        RankWhere(rank=0, name="rank 0", pid=7, stacks=in_collective),
        RankWhere(rank=1, name="rank 1", pid=7, stacks="thread MainThread:\n  elsewhere"),
        RankWhere(rank=2, name="rank 2", pid=0),
    ]
    tasks.other[f"{TRAINER}/ranks"] = [each.model_dump() for each in where]
    tasks.other[f"{TRAINER}/workers"] = [{"num_nodes": 2}, {"num_nodes": 3}]

    def facts_of(**options: Any) -> Facts:
        facts = Facts(directory="run", now=0.0, state="running")
        asyncio.run(live.ask(facts, Config(), Topology(), headers={}, **options))
        assert facts.asked
        assert facts.now > 0
        return facts

    facts = facts_of()
    assert facts.trainer_problem == ""
    assert [rank.name for rank in facts.ranks] == ["rank 0", "rank 1", "rank 2"]
    assert [rank.answered for rank in facts.ranks] == [True, True, False]
    assert [rank.collective for rank in facts.ranks] == ["all_reduce", "", ""]
    names = [service.name for service in facts.services]
    assert names == [*(f"{ROLLOUT}-{n}" for n in range(3)), ROUTER, DATA, REWARD, REPLAY]
    assert TRAINER not in names
    assert facts_of(own=True).ranks == []

    for answer, problem in (
        (httpx.ConnectError("Connection refused"), "refused"),
        (httpx.ReadTimeout("timed out"), "silent"),
        ([{"rank": "none"}], "error"),
    ):
        tasks.other[f"{TRAINER}/ranks"] = answer
        facts = facts_of()
        assert (facts.ranks, facts.trainer_problem) == ([], problem)

    # A service that is silent once was only busy.
    asked_again = iter([httpx.ReadTimeout("timed out")])
    answer_of = Tasks.__call__

    def once_late(self: Tasks, service: str, request: httpx.Request) -> httpx.Response:
        if service == DATA and request.url.path == "/health":
            for error in asked_again:
                raise error
        return answer_of(self, service, request)

    monkeypatch.setattr(Tasks, "__call__", once_late)
    assert {service.state for service in facts_of().services} == {"healthy"}
