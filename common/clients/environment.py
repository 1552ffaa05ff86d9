"""The client of the environment-server."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from common import Json
from common.clients.base import Client, Unreachable
from common.clients.network import Reply
from common.errors import NotFound, ServiceError
from common.process.futures import forgettable
from common.wire import codec
from common.wire.schemas import Episode, EpisodeRequest, Episodes

log = logging.getLogger(__name__)
_SLACK_S = 30.0
_PROBE_S = 2.0
_PROBES = 3
"""Failed probes in a row after which a node's episodes move to another node."""


@dataclass
class _Node:
    """A node of the environment-server."""

    client: Client
    calls: dict["asyncio.Task[Reply]", str] = field(default_factory=dict)
    """The requests in flight, with their ids."""
    failures: int = 0
    moved: set[str] = field(default_factory=set)
    """Ids of requests that moved to another node but may still run on this one."""

    @property
    def lost(self) -> bool:
        return self.failures >= _PROBES


class EnvironmentClient(Client):
    """Requests episodes from the node with the fewest requests in flight.

    The first node knows how many nodes there are. When a node is lost, its requests move to the
    others; if no other is left, the client waits for the node and sends it the same requests again.
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
        """`node` returns the client of a node by its index; None: there is only one node."""
        super().__init__(service, base_url, transport=transport, deadline_s=deadline_s)
        self._nodes = [_Node(self)]
        self._node = node
        self._watch: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for each in self._nodes[1:]:
            await each.client.close()
        await super().close()

    async def rewards(self) -> tuple[bool | None, bool]:
        """Returns whether episodes give a reward (None: known once one gave one), and whether these
        rewards say which episodes were right.
        """
        (served,) = await self.json("GET", "/environments", list[Json])
        return served["has_reward"], served["gives_verdicts"]

    async def episodes(self, request: EpisodeRequest) -> list[Episode]:
        """Returns the n episodes of a request. Cancelling this call also cancels the episodes."""
        await self._find_nodes()
        name = request.request_id
        body = request.model_dump_json()
        while True:
            node = min(
                self._nodes,
                key=lambda each: (each.lost, name not in each.calls.values(), len(each.calls)),
            )
            posted = _post(node.client, body, 3 * request.limits.deadline_s + _SLACK_S)
            call = forgettable(asyncio.create_task(posted))
            node.calls[call] = name
            node.moved.discard(name)
            self._start_watch()
            try:
                return codec.decode((await call).content, Episodes).episodes
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if name in node.moved and task is not None and not task.cancelling():
                    continue
                call.cancel()
                with suppress(ServiceError):
                    await asyncio.shield(_delete(node.client, name, deadline_s=2.0))
                raise
            except Unreachable:  # nobody waits for the episodes any more
                with suppress(ServiceError):
                    await _delete(node.client, name, deadline_s=2.0)
                raise
            finally:
                del node.calls[call]

    async def delete(self, request_id: str, deadline_s: float | None = None) -> None:
        """Ends the episodes of a request, and makes the server forget it."""
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
        """Probes the nodes while requests are in flight, or while a node must still drop requests
        that moved away.
        """
        while any(node.calls or node.moved for node in self._nodes):
            await asyncio.sleep(_PROBE_S)
            await asyncio.gather(*map(self._probe, self._nodes))

    async def _probe(self, node: _Node) -> None:
        """Probes a node.

        A lost node's requests move to others; a node that recovered drops the requests that moved
        away.
        """
        try:
            reason = await node.client.unhealthy_reason()
        except ServiceError as error:
            reason = str(error)
        node.failures = 0 if reason is None else node.failures + 1
        if reason is None:
            for name in [*node.moved]:
                try:
                    if name in node.moved:  # it may have come back meanwhile
                        await _delete(node.client, name, deadline_s=2.0)
                except ServiceError as error:
                    if error.status != NotFound.status:
                        continue  # the next probe tries again
                node.moved.discard(name)
        elif node.lost and node.calls and not all(each.lost for each in self._nodes):
            count = len(node.calls)
            log.warning(
                "%s does not answer (%s): %d requests go to other nodes",
                node.client.base_url,
                reason,
                count,
            )
            node.moved.update(node.calls.values())
            for call in node.calls:
                call.cancel()


async def _post(client: Client, body: str, deadline_s: float) -> Reply:
    """Requests episodes, again while the server is healthy: they may wait for a slot much longer
    than they run.
    """
    headers = {"accept": codec.MSGPACK}
    while True:
        try:
            return await client.request(
                "POST", "/episodes", content=body, headers=headers, deadline_s=deadline_s
            )
        except Unreachable:
            if await client.unhealthy_reason() is not None:
                raise


async def _delete(client: Client, request_id: str, deadline_s: float | None) -> None:
    await client.request("DELETE", f"/episodes/{request_id}", deadline_s=deadline_s)
