"""How every service and rollout node is, asked when somebody looks."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import httpx
from pydantic import BaseModel

from common import watchdog
from common.clients import Client
from common.config import Config
from common.errors import ServiceError, shorten
from common.topology import CRITIC, DATA, REPLAY, REWARD, ROLLOUT, TRAINER, Topology

PATIENCE_S = 2.0
"""What does not answer within this time is dead; with the page's own interval that is well within five seconds."""
_ENGINE_PATIENCE_S = 1.0
"""The agent decides whether the node is alive; its engine may be busy."""
_FRESH_S = 1.0
"""Several pages do not ask more often than one."""
_GENERATED = re.compile(r"^\w\S*genera\w+_tokens_total(?:{[^}]*})? (\S+)$", re.MULTILINE)
"""In the `/metrics` of both engines."""


class ServiceHealth(BaseModel):
    """One service or rollout node."""

    name: str
    state: Literal["healthy", "warning", "dead"]
    """`warning`: it answers, and does not serve as it should."""
    text: str = ""
    """What it does; why, where it is not healthy."""
    since_s: float = 0.0
    """For how long it has been in this state, as far as anybody looked."""
    version: int | None = None
    """Weights that it serves, or trained last."""
    running: int | None = None
    """Completions, or requests, in work."""
    waiting: int | None = None
    """Completions, answers or groups that wait there."""
    tokens_per_s: float | None = None
    """Generated, since it was asked before."""


@dataclass
class _Place:
    """One task's node, and what was seen of it."""

    name: str
    client: Client
    look: "Callable[[_Place], Awaitable[ServiceHealth]]"
    engine: Client | None = None
    state: str = ""
    since: float = 0.0
    generated: tuple[float, float] | None = None
    """Tokens, and when that was."""


class Health:
    """Asks the tasks of a job group. Used in one event loop, inside `running`.

    Args:
        config: of the run.
        topology: of this process.
        nodes: how many rollout nodes there are, as far as is known.
        version: of the newest weights, if there are any.
    """

    def __init__(self, config: Config, topology: Topology, nodes: Callable[[], int], version: Callable[[], int | None]) -> None:
        self._config, self._topology, self._nodes, self._version = config, topology, nodes, version
        self._rollout: list[_Place] = []
        self._others: list[_Place] = []
        self._lock = asyncio.Lock()
        self._answer: tuple[float, list[ServiceHealth]] = (-_FRESH_S, [])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connections that were opened inside are closed at the end."""
        config = self._config
        self._others = [
            self._place("router", ROLLOUT, config.rollout.router_port, _router),
            self._place(DATA, DATA, config.data.port, _data),
            self._place(REWARD, REWARD, config.reward.port, _reward),
            self._place(REPLAY, REPLAY, config.replay.port, _replay),
        ]
        if config.algorithm.needs_critic and config.critic.location == "server":
            self._others.append(self._place(CRITIC, CRITIC, config.critic.port, _critic))
        try:
            yield
        finally:
            for place in (*self._rollout, *self._others):
                for client in (place.client, place.engine):
                    if client is not None:
                        await client.close()
            self._rollout, self._others = [], []

    async def ask(self) -> list[ServiceHealth]:
        """How all are now: the trainer first, then the rollout nodes, then the services."""
        async with self._lock:
            if time.monotonic() - self._answer[0] >= _FRESH_S:
                for node in range(len(self._rollout), self._nodes()):  # one that was there is missed for ever
                    self._rollout.append(self._node(node))
                found = await asyncio.gather(*(_asked(place) for place in (*self._rollout, *self._others)))
                self._answer = (time.monotonic(), [self._trainer(), *found])
            return self._answer[1]

    def _place(self, name: str, task: str, port: int, look: Callable[[_Place], Awaitable[ServiceHealth]]) -> _Place:
        return _Place(name, Client(name, self._topology.url(task, port)), look)

    def _node(self, node: int) -> _Place:
        place, rollout = f"{ROLLOUT}-{node}", self._config.rollout
        urls = (self._topology.url(ROLLOUT, port, node) for port in (rollout.agent_port, rollout.engine_port))
        agent, engine = (Client(place, url) for url in urls)
        return _Place(place, agent, _rollout_node, engine)

    def _trainer(self) -> ServiceHealth:
        """This process."""
        place = watchdog.place()
        text, since = place or ("not in its training loop", 0.0)
        return ServiceHealth(name=TRAINER, state="healthy", text=text, since_s=since, version=self._version())


async def _asked(place: _Place) -> ServiceHealth:
    """What one of them says, or why it says nothing."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            found = await place.look(place)
    except TimeoutError:
        found = ServiceHealth(name=place.name, state="dead", text=f"no answer within {PATIENCE_S:.0f} s")
    except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
        found = ServiceHealth(name=place.name, state="dead", text=shorten(_short(error)))
    except (ServiceError, ValueError, KeyError, TypeError, IndexError) as error:
        text = shorten(str(error)) if isinstance(error, ServiceError) else f"an unexpected answer: {error!r}"
        found = ServiceHealth(name=place.name, state="dead", text=text)
    if found.state != place.state:
        place.state, place.since = found.state, time.monotonic()
    found.since_s = time.monotonic() - place.since
    return found


def _short(error: Exception) -> str:
    """Without what aiohttp says of a connection's TLS context."""
    return str(error).partition(" ssl:")[0] or type(error).__name__


async def _get(client: Client, path: str) -> Any:
    """The JSON of one call, asked once. Raises ServiceError for another status than 200."""
    response = await client.http.get(path, timeout=PATIENCE_S)
    if not response.is_success:
        raise ServiceError(f"{path} says {response.status_code}: {shorten(response.text)}", status=response.status_code)
    return response.json()


async def _unwell(place: _Place) -> ServiceHealth | None:
    """None when `/health` says 200, else what it says. Raises ServiceError when it wants another token."""
    response = await place.client.http.get("/health", timeout=PATIENCE_S)
    if response.is_success:
        return None
    if response.status_code == 401:
        raise ServiceError("it does not take the API_TOKEN of the trainer")
    try:
        reason = str(response.json()["reason"])
    except (ValueError, KeyError, TypeError):
        reason = f"/health says {response.status_code}"
    return ServiceHealth(name=place.name, state="warning", text=shorten(reason))


async def _rollout_node(place: _Place) -> ServiceHealth:
    """The agent knows state and version, the engine its load."""
    status = await _get(place.client, "/status")
    report, state = status["report"], str(status["report"]["state"])
    serving = state in ("ready", "updating")  # an update is a part of every step
    found = ServiceHealth(
        name=place.name,
        state="dead" if state == "failed" else "healthy" if serving else "warning",
        text=": ".join(filter(None, (state, report["detail"]))),
        version=report["version"],
    )
    if state == "ready" and not status["registered"]:
        found.state, found.text = "warning", "ready, but the router does not list it"
    if state == "ready" and place.engine is not None:  # while it loads weights it may answer late
        try:
            async with asyncio.timeout(_ENGINE_PATIENCE_S):
                await _load(found, place, place.engine)
        except TimeoutError:
            found.state, found.text = (
                "warning",
                f"ready, but its engine told no load within {_ENGINE_PATIENCE_S:.0f} s",
            )
    return found


async def _load(found: ServiceHealth, place: _Place, engine: Client) -> None:
    """What the engine has to do."""
    load = (await _get(engine, "/v1/loads"))["loads"]
    found.running = sum(part["num_running_reqs"] for part in load)
    found.waiting = sum(part["num_waiting_reqs"] for part in load)
    if all("gen_throughput" in part for part in load):
        found.tokens_per_s = sum(part["gen_throughput"] for part in load)
    else:
        found.tokens_per_s = await _rate(place, engine)


async def _rate(place: _Place, engine: Client) -> float | None:
    """Tokens a second since the last look, from the engine's counter; None at the first."""
    text = (await engine.http.get("/metrics", timeout=PATIENCE_S)).text
    counted = [float(value) for value in _GENERATED.findall(text)]
    if not counted:
        return None
    before, place.generated = place.generated, (sum(counted), time.monotonic())
    if before is None or place.generated[0] < before[0]:  # it was started again
        return None
    return (place.generated[0] - before[0]) / (place.generated[1] - before[1])


async def _router(place: _Place) -> ServiceHealth:
    if unwell := await _unwell(place):
        return unwell
    workers = (await _get(place.client, "/workers"))["workers"]
    healthy = sum(bool(worker["is_healthy"]) for worker in workers)
    state: Literal["healthy", "warning"] = "healthy" if healthy else "warning"
    return ServiceHealth(name=place.name, state=state, text=f"sends to {healthy} of {len(workers)} engines")


def _requests(stats: Any) -> int:
    """In work there, without the one that asks."""
    return max(0, int(stats["load"]["requests"]) - 1)


async def _data(place: _Place) -> ServiceHealth:
    if unwell := await _unwell(place):
        return unwell
    stats = await _get(place.client, "/stats")
    text = f"epoch {stats['epoch']}, {stats['position']:,} prompts drawn of {stats['total_available']:,}"
    return ServiceHealth(name=place.name, state="healthy", text=text, running=_requests(stats))


async def _reward(place: _Place) -> ServiceHealth:
    if unwell := await _unwell(place):
        return unwell
    stats = await _get(place.client, "/stats")
    graded = stats["graded"]
    failed = sum(count for status, count in graded.items() if status not in ("ok", "unparsable"))
    text = f"{sum(graded.values()):,} answers graded" + (f", {failed:,} failed" if failed else "")
    found = ServiceHealth(name=place.name, state="healthy", text=text, running=_requests(stats))
    found.waiting = stats["unfinished"]
    return found


async def _replay(place: _Place) -> ServiceHealth:
    if unwell := await _unwell(place):
        return unwell
    stats = await _get(place.client, "/stats")
    text = f"{stats['size']:,} of {stats['capacity']:,} completions"
    found = ServiceHealth(name=place.name, state="healthy", text=text, running=_requests(stats))
    found.waiting = stats["fresh"]
    return found


async def _critic(place: _Place) -> ServiceHealth:
    if unwell := await _unwell(place):
        return unwell
    status = await _get(place.client, "/status")
    return ServiceHealth(name=place.name, state="healthy", text="", version=status["step"])
