"""The client of the environment-server."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from common import wire
from common.clients import Client
from common.errors import ServiceError
from common.schemas import Episode, EpisodeRequest, Episodes

log = logging.getLogger(__name__)
_SLACK_S = 30.0
_PROBE_S = 2.0
_PROBES = 3
"""Failed probes in a row after which the episodes of a node are played on another one."""


@dataclass
class _Node:
    """A node of the environment-server."""

    client: Client
    calls: dict["asyncio.Task[httpx.Response]", str] = field(default_factory=dict)
    """The ids of the requests that it works on."""
    failures: int = 0
    moved: set[str] = field(default_factory=set)
    """Requests that were given to another node, and that this one may still work on."""

    @property
    def lost(self) -> bool:
        return self.failures >= _PROBES


class EnvironmentClient(Client):
    """Asks for episodes, each time the node with the fewest requests.

    The first node knows how many there are. When a node is lost, its requests are sent to the others; one that has no others
    is waited for, and gets the same requests again.
    """

    def __init__(
        self,
        service: str,
        base_url: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        deadline_s: float = 120.0,
        node: Callable[[int], Client] | None = None,
    ) -> None:
        """`node` returns the client of a node; None: there is one."""
        super().__init__(service, base_url, transport=transport, deadline_s=deadline_s)
        self._nodes, self._node = [_Node(self)], node
        self._watch: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for each in self._nodes[1:]:
            await each.client.close()
        await super().close()

    async def episodes(self, request: EpisodeRequest) -> list[Episode]:
        """Returns the n episodes of a request. When it is cancelled, so are they."""
        await self._find_nodes()
        headers = {"content-type": "application/json", "accept": wire.MSGPACK}
        name = request.request_id
        body, limit = request.model_dump_json(), time.monotonic() + 3 * request.limits.deadline_s + _SLACK_S
        while True:
            node = min(self._nodes, key=lambda each: (each.lost, name not in each.calls.values(), len(each.calls)))
            call = asyncio.create_task(
                node.client.request(
                    "POST", "/episodes", content=body, headers=headers, deadline_s=max(0.1, limit - time.monotonic())
                )
            )
            node.calls[call] = name
            node.moved.discard(name)
            self._start_watch()
            try:
                return wire.decode((await call).content, Episodes).episodes
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if name in node.moved and task is not None and not task.cancelling():
                    continue
                call.cancel()
                with suppress(ServiceError):
                    await asyncio.shield(_delete(node.client, name, deadline_s=2.0))
                raise
            finally:
                del node.calls[call]

    async def delete(self, request_id: str, deadline_s: float | None = None) -> None:
        """Ends the episodes of a request and forgets it."""
        await _delete(self, request_id, deadline_s)

    async def _find_nodes(self) -> None:
        if self._node is None:
            return
        count = int((await self.request("GET", "/stats")).json()["nodes"])
        while len(self._nodes) < count:
            self._nodes.append(_Node(self._node(len(self._nodes))))
        self._node = None

    def _start_watch(self) -> None:
        if len(self._nodes) > 1 and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._watch_nodes())

    async def _watch_nodes(self) -> None:
        """Probes the nodes while they work, or one is to be told of what it has lost."""
        while any(node.calls or node.moved for node in self._nodes):
            await asyncio.sleep(_PROBE_S)
            await asyncio.gather(*map(self._probe, self._nodes))

    async def _probe(self, node: _Node) -> None:
        """Asks a node whether it is well. One that is not loses its requests, one that is again forgets those it has lost."""
        try:
            reason = await node.client.unhealthy_reason()
        except ServiceError as error:
            reason = str(error)
        node.failures = 0 if reason is None else node.failures + 1
        if reason is None:
            while node.moved:
                with suppress(ServiceError):
                    await _delete(node.client, node.moved.pop(), deadline_s=2.0)
        elif node.lost and node.calls and not all(each.lost for each in self._nodes):
            count = len(node.calls)
            log.warning("%s does not answer (%s): %d requests go to other nodes", node.client.base_url, reason, count)
            node.moved.update(node.calls.values())
            for call in node.calls:
                call.cancel()


async def _delete(client: Client, request_id: str, deadline_s: float | None) -> None:
    await client.request("DELETE", f"/episodes/{request_id}", deadline_s=deadline_s)
