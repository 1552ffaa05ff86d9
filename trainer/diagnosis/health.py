"""Health of every service and rollout node, checked on request."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import aiohttp
import httpx
from pydantic import BaseModel

from common.clients.base import Client
from common.clients.unreachable import Problem, problem_of
from common.errors import ServiceError, Unauthorized, shorten
from common.process import watchdog
from common.process.topology import (
    CRITIC,
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
_FAILURES = (ServiceError, httpx.HTTPError, aiohttp.ClientError, OSError, ValueError)
"""What a call raises that gets no usable answer."""
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


Check: TypeAlias = "Callable[[_Target], Awaitable[ServiceHealth]]"


@dataclass
class _Target:
    """A node of a task, with the results of earlier checks."""

    name: str
    client: Client
    check: Check
    engine: Client | None = None
    """The engine of a rollout node, whose agent the client calls."""
    state: str = ""
    since: float = 0.0


class Health:
    """Checks the tasks of a job group. Used in one event loop, inside `running`.

    `nodes` returns the number of known rollout nodes, `version` the newest weight version or None;
    `headers` are sent, None: the token of this process's run.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        nodes: Callable[[], int],
        version: Callable[[], int | None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = headers
        self._config = config
        self._topology = topology
        self._nodes = nodes
        self._version = version
        self._targets: dict[str, _Target] = {}
        """All nodes by name: one that was seen is checked forever."""
        self._environments = 1
        self._lock = asyncio.Lock()
        self._answer: tuple[float, list[ServiceHealth]] = (-_FRESH_S, [])

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
            if time.monotonic() - self._answer[0] >= _FRESH_S:
                self._find()
                # Rollout nodes first, whenever they appeared.
                targets = sorted(self._targets.values(), key=lambda target: target.engine is None)
                found = await asyncio.gather(*map(_check, targets))
                self._answer = (time.monotonic(), [self._trainer(), *found])
            return self._answer[1]

    async def where(self) -> dict[str, Where]:
        """Returns what the services and agents are doing, by name. To be called after `ask`: who
        was dead is not asked.
        """
        clients = {}
        for name, target in self._targets.items():
            if target.state != "dead" and name != ROUTER:  # which is another program
                clients[name] = target.client
        answers = await asyncio.gather(*map(_where, clients.values()))
        found = zip(clients, answers, strict=True)
        return {name: answer for name, answer in found if answer is not None}

    def _find(self) -> None:
        """Adds the nodes that are known by now."""
        config = self._config
        rollout = config.rollout
        for node in range(self._nodes()):
            self._add(ROLLOUT, rollout.agent_port, _check_rollout_node, node=node)
        self._add(ROLLOUT, rollout.router_port, _check_router, name=ROUTER)
        self._add(DATA, config.data.port, _check_data, name=DATA)
        self._add(REWARD, config.reward.port, _check_reward, name=REWARD)
        self._add(REPLAY, config.replay.port, _check_replay, name=REPLAY)
        if config.algorithm.needs_critic and config.critic.location == "server":
            self._add(CRITIC, config.critic.port, _check_critic, name=CRITIC)
        if config.environment.name:
            check = _service("/stats", self._environment)
            for node in range(self._environments):
                self._add(ENVIRONMENT, config.environment.port, check, node=node)

    def _add(self, task: str, port: int, check: Check, *, node: int = 0, name: str = "") -> None:
        name = name or f"{task}-{node}"
        if name in self._targets:
            return
        engine = None
        if check is _check_rollout_node:
            url = self._topology.url(ROLLOUT, self._config.rollout.engine_port, node)
            engine = Client(name, url, headers=self._headers)
        client = Client(name, self._topology.url(task, port, node), headers=self._headers)
        self._targets[name] = _Target(name, client, check, engine=engine)

    def _environment(self, stats: Any) -> dict[str, Any]:
        # The first node reports how many there are.
        self._environments = max(self._environments, int(stats["nodes"]))
        episodes = stats["episodes"]
        text = f"{episodes['ok']:,} episodes"
        for status, count in episodes.items():
            if count and status != "ok":
                text += f", {count:,} {status}"
        hung = stats["hung_calls"]
        if hung:
            text += f"; {hung:,} calls are stuck, the limit is {stats['hung_calls_limit']:,}"
        return {"text": text, "running": stats["running"]}

    def _trainer(self) -> ServiceHealth:
        text, since = watchdog.place() or ("not in its training loop", 0.0)
        return ServiceHealth(
            name=TRAINER, state="healthy", text=text, since_s=since, version=self._version()
        )


async def _check(target: _Target) -> ServiceHealth:
    """Returns the health of one target; one that does not answer properly is dead."""
    found = ServiceHealth(name=target.name, state="dead")
    try:
        async with asyncio.timeout(PATIENCE_S):
            found = await target.check(target)
    except TimeoutError:
        found.text = f"no answer within {PATIENCE_S:.0f} s"
        found.problem = "silent"
    except (ServiceError, httpx.HTTPError, aiohttp.ClientError, OSError) as error:
        found.text = shorten(_network_text(error))
        found.problem = problem_of(error)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        found.text = f"an unexpected answer: {error!r}"
        found.problem = "error"
    if found.state != target.state:
        target.state = found.state
        target.since = time.monotonic()
    found.since_s = time.monotonic() - target.since
    return found


def _network_text(error: Exception) -> str:
    text = str(error).partition(" ssl:")[0]  # aiohttp appends the connection's TLS context
    return text or type(error).__name__


async def _get(client: Client, path: str) -> Any:
    """Returns the JSON of one call, without retries. Raises ServiceError for an unsuccessful
    status.
    """
    response = await client.http.get(path, timeout=PATIENCE_S)
    if not response.is_success:
        raise ServiceError(
            f"{path} says {response.status_code}: {shorten(response.text)}",
            status=response.status_code,
        )
    return response.json()


async def _where(client: Client) -> Where | None:
    """Returns the answer of `GET /where`; None without one."""
    with suppress(*_FAILURES):
        async with asyncio.timeout(PATIENCE_S):
            return Where.model_validate(await _get(client, "/where"))
    return None


def _service(path: str, fields_of: Callable[[Any], dict[str, Any]]) -> Check:
    """Returns the check of a service: `/health`, then the fields of `ServiceHealth` that
    `fields_of` finds in the answer of `path`.
    """

    async def check(target: _Target) -> ServiceHealth:
        response = await target.client.http.get("/health", timeout=PATIENCE_S)
        if response.is_success:
            fields = {"state": "healthy"} | fields_of(await _get(target.client, path))
            return ServiceHealth(name=target.name, **fields)
        if response.status_code == 401:
            raise Unauthorized("it rejects the API_TOKEN of the trainer")
        found = ServiceHealth(name=target.name, state="warning", problem="not_ready")
        found.text = f"/health says {response.status_code}"
        with suppress(ValueError, KeyError, TypeError):
            answer = response.json()
            found.text = shorten(str(answer["reason"]))
            if answer.get("lost") is True:
                found.problem = "lost"
        return found

    return check


def _router(answer: Any) -> dict[str, Any]:
    workers = answer["workers"]
    healthy = sum(bool(worker["is_healthy"]) for worker in workers)
    return {
        "state": "healthy" if healthy else "warning",
        "text": f"sends to {healthy} of {len(workers)} engines",
    }


def _requests(stats: Any) -> int:
    """Returns the number of requests in progress, except this one."""
    return max(0, int(stats["load"]["requests"]) - 1)


def _data(stats: Any) -> dict[str, Any]:
    text = (
        f"epoch {stats['epoch']}, {stats['position']:,} prompts drawn of "
        f"{stats['total_available']:,}"
    )
    return {"text": text, "running": _requests(stats)}


def _reward(stats: Any) -> dict[str, Any]:
    graded = stats["graded"]
    total = sum(graded.values())
    failed = total
    for status in ("ok", "unparsable", "unevaluated", "inapplicable"):
        failed -= graded.get(status, 0)
    text = f"{total:,} answers graded"
    if failed:
        text += f", {failed:,} failed"
    return {"text": text, "running": _requests(stats), "waiting": stats["unfinished"]}


def _replay(stats: Any) -> dict[str, Any]:
    text = f"{stats['size']:,} of {stats['capacity']:,} completions"
    return {"text": text, "running": _requests(stats), "waiting": stats["fresh"]}


_check_router = _service("/workers", _router)
_check_data = _service("/stats", _data)
_check_reward = _service("/stats", _reward)
_check_replay = _service("/stats", _replay)
_check_critic = _service("/status", lambda status: {"version": status["step"]})


async def _check_rollout_node(target: _Target) -> ServiceHealth:
    """Asks the agent for state and version, and the engine for its load."""
    status = await _get(target.client, "/status")
    report = status["report"]
    state = str(report["state"])
    found = ServiceHealth(
        name=target.name,
        state="warning",
        text=": ".join(filter(None, (state, report["detail"]))),
        version=report["version"],
        reported=state,
    )
    if state == "failed":
        found.state = "dead"
        found.problem = "error"
    elif state in ("ready", "updating"):  # an update is a part of every step
        found.state = "healthy"
    else:
        found.problem = "not_ready"
    if state == "ready" and not status["registered"]:
        found.state = "warning"
        found.problem = "not_ready"
        found.text = "ready, but the router does not list it"
    if state == "ready" and target.engine is not None:  # while loading weights it may answer late
        try:
            async with asyncio.timeout(_ENGINE_PATIENCE_S):
                load = (await _get(target.engine, "/v1/loads"))["loads"]
                found.running = sum(part["num_running_reqs"] for part in load)
                found.waiting = sum(part["num_waiting_reqs"] for part in load)
                found.tokens_per_s = sum(part["gen_throughput"] for part in load)
        except TimeoutError:
            found.state = "warning"
            found.problem = "silent"
            found.of_engine = True
            found.text = (
                f"ready, but its engine did not report its load within {_ENGINE_PATIENCE_S:.0f} s"
            )
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            found.state = "dead"
            found.problem = problem_of(error)
            found.of_engine = True
            found.text = shorten(f"its engine does not answer: {_network_text(error)}")
    return found
