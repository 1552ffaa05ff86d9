"""Health of every service and rollout node, checked on request."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import httpx
from pydantic import BaseModel

from common import Json
from common.clients.base import Client
from common.clients.unreachable import Problem, problem_of
from common.errors import ServiceError, Unauthorized, shorten
from common.process import watchdog
from common.process.topology import (
    DATA,
    ENVIRONMENT,
    REPLAY,
    REWARD,
    ROLLOUT,
    TRAINER,
    Topology,
)
from common.process.watchdog import Where
from common.settings.config import Config

PATIENCE_S = 2.0
"""A service that does not answer within this time is dead; the page then shows it within five
seconds."""
_ENGINE_PATIENCE_S = 1.0
"""The agent's answer decides whether the node is alive; its engine may be busy."""
ROUTER = "router"
NO_ANSWER = (ServiceError, httpx.HTTPError, aiohttp.ClientError, OSError)
"""What a call raises that gets no answer, or one of an unsuccessful status."""
BAD_ANSWER = (ValueError, LookupError, TypeError)
"""What reading an answer of another shape raises."""
_FRESH_S = 1.0
"""How long a result is reused for all pages."""


class ServiceHealth(BaseModel):
    """One service or rollout node."""

    name: str
    state: Literal["healthy", "warning", "dead"]
    """`warning`: it answers but does not serve properly."""
    text: str = ""
    """Its current work, or why it is not healthy."""
    problem: Problem = ""
    """What kind of reason that is."""
    of_engine: bool = False
    """Whether it is that of a rollout node's engine, whose agent answers."""
    reported: str = ""
    """The state that a rollout node's agent reports."""
    since_s: float = 0.0
    """Observed time in this state."""
    version: int | None = None
    """Weight version that it serves or trained last."""
    running: int | None = None
    """Completions or requests in progress."""
    waiting: int | None = None
    """Completions, answers or groups that wait."""
    tokens_per_s: float | None = None
    """Generation rate."""


@dataclass
class _Target:
    """A node of a task, with the results of earlier checks."""

    name: str
    client: Client
    engine: Client | None = None
    """The engine of a rollout node, whose agent the client calls."""
    path: str = ""
    """The call whose answer has the numbers of a service."""
    fields_of: Callable[[Any], Json] = dict
    """Returns the fields of `ServiceHealth` that such an answer gives."""
    state: str = ""
    since: float = 0.0


@dataclass
class Health:
    """Checks the tasks of a job group. Used in one event loop, inside `running`.

    `nodes` returns the number of known rollout nodes, `version` the newest weight version or None;
    `headers` are sent, None: the token of this process's run.
    """

    config: Config
    topology: Topology
    nodes: Callable[[], int]
    version: Callable[[], int | None]
    headers: Mapping[str, str] | None = None
    _targets: dict[str, _Target] = field(default_factory=dict)
    """All nodes by name: one that was seen is checked forever."""
    _environments: int = 1
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _answer: list[ServiceHealth] = field(default_factory=list)
    _answered_at: float = -_FRESH_S

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Closes the connections at the end of the block."""
        try:
            yield
        finally:
            for target in self._targets.values():
                for client in (target.client, target.engine):
                    if client is not None:
                        await client.close()
            self._targets = {}

    async def ask(self) -> list[ServiceHealth]:
        """Returns the health of the trainer, the rollout nodes and the services, in this order."""
        async with self._lock:
            if time.monotonic() - self._answered_at >= _FRESH_S:
                self._find()
                # Rollout nodes first, whenever they appeared.
                targets = sorted(self._targets.values(), key=lambda target: target.engine is None)
                found = await asyncio.gather(*map(_check, targets))
                place, since = watchdog.place() or ("not in its training loop", 0.0)
                trainer = ServiceHealth(
                    name=TRAINER,
                    state="healthy",
                    text=place,
                    since_s=since,
                    version=self.version(),
                )
                self._answer = [trainer, *found]
                self._answered_at = time.monotonic()
            return self._answer

    async def where(self) -> dict[str, Where]:
        """Returns what the services and agents are doing, by name. To be called after `ask`: who
        was dead is not asked.
        """
        # The router is another program, which has no such call.
        asked = [
            target
            for target in self._targets.values()
            if target.state != "dead" and target.name != ROUTER
        ]
        answers = await asyncio.gather(*(_where(target.client) for target in asked))
        found = zip(asked, answers, strict=True)
        return {target.name: answer for target, answer in found if answer is not None}

    def _find(self) -> None:
        """Adds the nodes that are known by now."""
        config = self.config
        rollout = config.rollout
        for node in range(self.nodes()):
            self._add(ROLLOUT, rollout.agent_port, node=node, engine_port=rollout.engine_port)
        self._add(ROLLOUT, rollout.router_port, "/workers", _router, name=ROUTER)
        self._add(DATA, config.data.port, "/stats", _data, name=DATA)
        self._add(REWARD, config.reward.port, "/stats", _reward, name=REWARD)
        self._add(REPLAY, config.replay.port, "/stats", _replay, name=REPLAY)
        if config.environment.name:
            for node in range(self._environments):
                self._add(
                    ENVIRONMENT, config.environment.port, "/stats", self._environment, node=node
                )

    def _add(
        self,
        task: str,
        port: int,
        path: str = "",
        fields_of: Callable[[Any], Json] = dict,
        *,
        node: int = 0,
        name: str = "",
        engine_port: int = 0,
    ) -> None:
        name = name or f"{task}-{node}"
        if name not in self._targets:
            engine = self._client(name, task, engine_port, node) if engine_port else None
            client = self._client(name, task, port, node)
            self._targets[name] = _Target(name, client, engine, path=path, fields_of=fields_of)

    def _client(self, name: str, task: str, port: int, node: int) -> Client:
        return Client(name, self.topology.url(task, port, node), headers=self.headers)

    def _environment(self, stats: Any) -> Json:
        # The first node reports how many there are.
        self._environments = max(self._environments, int(stats["nodes"]))
        text = f"episodes: {_counts(stats['episodes'])}"
        hung = stats["hung_calls"]
        if hung:
            text += f"; {hung:,} calls are stuck, the limit is {stats['hung_calls_limit']:,}"
        return {"text": text, "running": stats["running"]}


async def _check(target: _Target) -> ServiceHealth:
    """Returns the health of one target; one that does not answer properly is dead."""
    found = ServiceHealth(name=target.name, state="dead")
    try:
        async with asyncio.timeout(PATIENCE_S):
            found = await (_rollout_node if target.engine else _service)(target)
    except TimeoutError:
        found.text = f"no answer within {PATIENCE_S:.0f} s"
        found.problem = "silent"
    except NO_ANSWER as error:
        found.text = _network_text(error)
        found.problem = problem_of(error)
    except BAD_ANSWER as error:
        found.text = f"an unexpected answer: {error!r}"
        found.problem = "error"
    if found.state != target.state:
        target.state = found.state
        target.since = time.monotonic()
    found.since_s = time.monotonic() - target.since
    return found


def _network_text(error: Exception) -> str:
    text = str(error).partition(" ssl:")[0]  # aiohttp appends the connection's TLS context
    return shorten(text or type(error).__name__)


async def get(client: Client, path: str, timeout_s: float = PATIENCE_S) -> Any:
    """Returns the JSON of one call, without retries. Raises ServiceError for an unsuccessful
    status.
    """
    response = await client.http.get(path, timeout=timeout_s)
    if not response.is_success:
        reason = f"{path} says {response.status_code}: {shorten(response.text)}"
        raise ServiceError(reason, status=response.status_code)
    return response.json()


async def _where(client: Client) -> Where | None:
    """Returns the answer of `GET /where`; None without one."""
    with suppress(*NO_ANSWER, ValueError):
        async with asyncio.timeout(PATIENCE_S):
            return Where.model_validate(await get(client, "/where"))
    return None


async def _service(target: _Target) -> ServiceHealth:
    """Asks a service for its `/health`, and a healthy one for its numbers."""
    response = await target.client.http.get("/health")
    if response.is_success:
        fields = target.fields_of(await get(target.client, target.path))
        return ServiceHealth(name=target.name, **{"state": "healthy", **fields})
    if response.status_code == 401:  # it is well, and will not serve this run
        raise Unauthorized("it rejects the API_TOKEN of the trainer")
    found = ServiceHealth(name=target.name, state="warning", problem="not_ready")
    found.text = f"/health says {response.status_code}"
    with suppress(*BAD_ANSWER):
        answer = response.json()
        found.text = shorten(str(answer["reason"]))
        if answer.get("lost") is True:
            found.problem = "lost"
    return found


def _router(answer: Any) -> Json:
    workers = answer["workers"]
    healthy = sum(bool(worker["is_healthy"]) for worker in workers)
    return {
        "state": "healthy" if healthy else "warning",
        "text": f"sends to {healthy} of {len(workers)} engines",
    }


def _requests(stats: Any) -> int:
    """Returns the number of requests in progress, except this one."""
    return max(0, int(stats["load"]["requests"]) - 1)


def _data(stats: Any) -> Json:
    drawn = f"{stats['position']:,} prompts drawn of {stats['total_available']:,}"
    return {"text": f"epoch {stats['epoch']}, {drawn}", "running": _requests(stats)}


def _counts(of_status: Mapping[str, int]) -> str:
    """Returns counts by status as text, such as `1,200 ok, 3 timeout`."""
    return ", ".join(f"{count:,} {status}" for status, count in of_status.items() if count) or "0"


def _reward(stats: Any) -> Json:
    text = f"graded: {_counts(stats['graded'])}"
    return {"text": text, "running": _requests(stats), "waiting": stats["unfinished"]}


def _replay(stats: Any) -> Json:
    text = f"{stats['size']:,} of {stats['capacity']:,} completions"
    return {"text": text, "running": _requests(stats), "waiting": stats["fresh"]}


async def _rollout_node(target: _Target) -> ServiceHealth:
    """Asks the agent for state and version, and the engine for its load."""
    status = await get(target.client, "/status")
    report = status["report"]
    state = str(report["state"])
    found = ServiceHealth(
        name=target.name,
        state="warning",
        problem="not_ready",
        text=": ".join(filter(None, (state, report["detail"]))),
        version=report["version"],
        reported=state,
    )
    if state == "failed":
        found.state = "dead"
        found.problem = "error"
    elif state == "ready" and not status["registered"]:  # so it gets no requests
        found.text = "ready, but the router does not list it"
    elif state in ("ready", "updating"):  # an update is a part of every step
        found.state = "healthy"
        found.problem = ""
    if state == "ready" and target.engine is not None:  # while loading weights it may answer late
        await _add_load(found, target.engine)
    return found


async def _add_load(node: ServiceHealth, engine: Client) -> None:
    """Adds what the engine of a node says of its load, or that it does not answer."""
    try:
        async with asyncio.timeout(_ENGINE_PATIENCE_S):
            loads = (await get(engine, "/v1/loads"))["loads"]
    except TimeoutError:
        late = f"its engine did not report its load within {_ENGINE_PATIENCE_S:.0f} s"
        node.state = "warning"
        node.problem = "silent"
        node.text = f"ready, but {late}"
        node.of_engine = True
    except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
        node.state = "dead"
        node.problem = problem_of(error)
        node.text = f"its engine does not answer: {_network_text(error)}"
        node.of_engine = True
    else:
        node.running = sum(part["num_running_reqs"] for part in loads)
        node.waiting = sum(part["num_waiting_reqs"] for part in loads)
        node.tokens_per_s = sum(part["gen_throughput"] for part in loads)
