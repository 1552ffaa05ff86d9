"""What the engines behind an address do: whether they generate, and how much more they have room
for.

The address is that of a router, which lists its engines, or of one engine. All of them answer
`GET /v1/loads`, SGLang's and the embedded ones; of other servers nothing is known.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from common import Json
from common.clients.base import Client, Look
from common.clients.network import Reply

_FRESH_S = 5.0
"""Seconds for which all waiting calls share one look at the engines."""
_UNKNOWN_CALL = (404, 405)
_QUEUED_SHARE = 0.25
"""Completions that may wait in an engine, as a share of those that it decodes at once: enough that
it always has a next one, few enough that another engine can still take them."""


class EngineLoad(BaseModel):
    """The load of an engine, or of one of its data-parallel parts, by SGLang's names."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    """Tokens of keys and values; SGLang counts a prompt that is being computed only here."""
    max_running_requests: int = 0
    """0: it does not say."""
    gen_throughput: float = 0.0
    computed_tokens: int = 0
    """Tokens that an embedded engine has computed since its start."""

    @property
    def is_idle(self) -> bool:
        return not (self.num_running_reqs or self.num_waiting_reqs or self.num_used_tokens)

    @property
    def mark(self) -> tuple[float, ...]:
        """Changes with every token. New requests that only wait do not change it."""
        return (
            self.num_running_reqs,
            self.num_used_tokens,
            self.gen_throughput,
            self.computed_tokens,
        )

    @property
    def room(self) -> float:
        """How many more completions it should get; infinite if it does not say."""
        if not self.max_running_requests:
            return math.inf
        at_once = self.max_running_requests
        if self.num_waiting_reqs and self.num_running_reqs:
            # They fill its memory, whatever its number of slots.
            at_once = self.num_running_reqs
        wanted = math.ceil(at_once * (1 + _QUEUED_SHARE))
        return max(0, wanted - self.num_running_reqs - self.num_waiting_reqs)


class _Loads(BaseModel):
    loads: list[EngineLoad]


Get = Callable[[str], Awaitable[Reply]]
"""Asks an address, or a path of a router, once (`Client.get`)."""


async def ask_load(get: Get, url: str) -> list[EngineLoad] | None:
    """Returns the load of an engine's parts, none for a server that does not know the call; None
    when it does not answer.
    """
    try:
        answer = await get(f"{url}/v1/loads")
        return _Loads.model_validate_json(answer.content).loads
    except (httpx.TransportError, TimeoutError, OSError):
        return None
    except ValidationError:  # 404, or another program's answer
        return []


class Engines:
    """The engines behind `get`: those that its router lists, or those at `urls`."""

    def __init__(self, get: Get, urls: Sequence[str] = ()) -> None:
        self._get = get
        self._urls = list(urls)
        self._looking = asyncio.Lock()
        self._looked_at = -math.inf
        self._loads: dict[str, list[EngineLoad] | None] = {}
        """By engine; None for one that did not answer."""
        self._known: list[EngineLoad] = []
        """Those of the engines that say them."""
        self._marks: dict[str, list[tuple[float, ...]]] = {}
        self.progress = 0
        """Grows as long as one of them generates; by at most 1 per look and engine."""

    async def look(self, fresh_s: float) -> list[EngineLoad] | None:
        """Returns the loads of all engines that say them, at most `fresh_s` seconds old; None when
        one of them does not answer.
        """
        loop = asyncio.get_running_loop()
        async with self._looking:
            if loop.time() - self._looked_at >= fresh_s:
                urls = self._urls or await self._listed()
                found = await asyncio.gather(*(ask_load(self._get, url) for url in urls))
                self._loads = dict(zip(urls, found, strict=True))
                self._looked_at = loop.time()
                for url, loads in self._loads.items():
                    if loads:
                        marks = [load.mark for load in loads]
                        self.progress += self._marks.get(url, marks) != marks
                        self._marks[url] = marks
                self._known = [load for loads in found for load in loads or []]
        return None if None in self._loads.values() else self._known

    async def room(self) -> float:
        """Returns how many more completions the engines should get now; infinite if that is not
        known.
        """
        await self.look(fresh_s=0.0)
        return sum(load.room for load in self._known) if self._known else math.inf

    async def _listed(self) -> list[str]:
        """Returns the healthy engines of the router; for a server that is none, its own address."""
        try:
            answer = await self._get("/workers")
            if answer.status_code in _UNKNOWN_CALL:
                self._urls = [""]
                return self._urls
            workers: list[Json] = answer.json()["workers"]
            return [each["url"].rstrip("/") for each in workers if each["is_healthy"]]
        except (httpx.TransportError, TimeoutError, OSError, ValueError, LookupError, TypeError):
            return []


class GeneratingClient(Client):
    """Client of a router or an engine: a call lasts as long as one of the engines generates,
    however many are in its queue.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.engines = Engines(self.get)

    async def _look(self, attempt: str) -> Look:
        await self._loads()
        return Look(progress=self.engines.progress)

    async def _loads(self) -> list[EngineLoad] | None:
        return await self.engines.look(min(_FRESH_S, self.deadline_s / 8))
