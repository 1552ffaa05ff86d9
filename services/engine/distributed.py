"""Weights broadcast into the running engine: SGLang's calls for groups and update sessions. The
sender is `trainer.weights.transfer`; the node's agent (`services.rollout.weights.receive`) makes
the calls.

Tensors are staged in memory until `/end_weight_update`, which copies all of them or none, so a
failed broadcast changes nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from fastapi import FastAPI, Request, Response
from torch import Tensor

from common.errors import ServiceError
from common.process.daemon_threads import in_daemon_thread
from common.process.futures import forgettable
from common.wire.schemas import MAX_TENSORS, AtMost, Bucket, Shapes
from learning.weight_group import digest, join, size_of, views
from services.engine.engine import Engine
from services.engine.requests import Body, add_call, read_body, reply
from services.engine.scheduler import RequestRefused
from services.engine.weights import check_tensors, own_tensors
from services.http.openapi import OBJECT, described

_T = TypeVar("_T")
_TIMEOUT_S = 1800.0
"""Timeout of rendezvous and broadcasts, as in SGLang; `/destroy_weights_update_group` ends them
sooner."""
_GroupState = tuple[dist.ProcessGroup | None, asyncio.Event]
"""A group, None while its ranks have not all joined, and an event that is set when it is left."""
_AGAIN = "POST /destroy_weights_update_group, then begin again"
_JOIN_AGAIN = "POST /init_weights_update_group again, on every rank"


class GroupBody(Body):
    """The body of `/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class InitBody(GroupBody):
    """The body of `/init_weights_update_group`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"


class DistributedBody(GroupBody):
    """The body of `/update_weights_from_distributed`."""

    names: Annotated[list[str], AtMost(MAX_TENSORS)]
    dtypes: Annotated[list[str], AtMost(MAX_TENSORS)]
    shapes: Shapes
    load_format: Literal["flattened_bucket"]
    weight_version: str | None = None


class CheckBody(Body):
    """The body of `/weights_checker`."""

    action: Literal["checksum"] = "checksum"


class WeightUpdates:
    """The engine's groups and its one update session. Used from the event loop; receiving runs in
    other threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[str, _GroupState] = {}
        self._staged: dict[str, Tensor] | None = None
        """What the open session has received; None when no session is open."""
        self._version: str | None = None
        """The weight version that the session's last update names."""
        self._failure = ""

    async def init(self, body: InitBody) -> str:
        """Joins a group; returns when all ranks have joined. Raises RequestRefused."""
        name = body.group_name
        if body.backend != "gloo":
            reason = "the embedded engine receives by gloo only"
            raise RequestRefused(
                reason, field="backend", value=body.backend, remedy="set backend to gloo"
            )
        if name in self._groups:
            reason = "a group of that name exists"
            raise RequestRefused(reason, field="group_name", value=name, remedy=_AGAIN)
        left = asyncio.Event()
        self._groups[name] = (None, left)

        def work() -> dist.ProcessGroup:
            return join(
                body.master_address,
                body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=name,
                backend=body.backend,
                timeout_s=_TIMEOUT_S,
            )

        try:
            self._groups[name] = (await _until_left(left, work), left)
        except (RuntimeError, ValueError, RequestRefused) as error:
            # Unless another call has made a new group of this name.
            if self._groups.get(name, (None, None))[1] is left:
                del self._groups[name]
            reason = f"Failed to initialize custom process group: {error}"
            raise RequestRefused(
                reason, field="group_name", value=name, remedy=_JOIN_AGAIN
            ) from None
        return "Succeeded to initialize custom process group."

    async def destroy(self, body: GroupBody) -> str:
        """Leaves a group; its pending rendezvous or broadcast fails at once. Raises RequestRefused
        for an unknown group.
        """
        name = body.group_name
        if name not in self._groups:
            reason = "The group to be destroyed does not exist."
            remedy = "name a group of /init_weights_update_group"
            raise RequestRefused(reason, field="group_name", value=name, remedy=remedy)
        group, left = self._groups.pop(name)
        left.set()
        if group is not None:
            dist.destroy_process_group(group)
        return "Succeeded to destroy custom process group."

    async def begin(self, _: Body) -> str:
        """Opens the session. Raises RequestRefused when one is open."""
        if self._staged is not None:
            reason = "a weight-update session is already open; call end_weight_update() first"
            raise RequestRefused(reason, field="session", remedy="POST /end_weight_update")
        self._staged = {}
        self._failure = ""
        self._version = None
        return "Success"

    async def receive(self, body: DistributedBody) -> str:
        """Receives the broadcast of these tensors and stages them for `end`. Raises RequestRefused
        or BadWeights.
        """
        session = self._session()
        try:
            group, left = self._groups.get(body.group_name, (None, asyncio.Event()))
            if group is None:
                raise RequestRefused(
                    f"Failed to receive weights: Group {body.group_name} "
                    f"not in {list(self._groups)}.",
                    field="group_name",
                    value=body.group_name,
                    remedy="POST /init_weights_update_group first",
                )
            bucket = Bucket(names=body.names, dtypes=body.dtypes, shapes=body.shapes)
            found = await _until_left(left, lambda: self._receive(group, bucket))
        except (RuntimeError, ValueError, ServiceError) as error:
            self._failure = f"Failed to receive weights: {error}"
            if isinstance(error, ServiceError):
                raise
            raise RequestRefused(
                self._failure, field="group_name", value=body.group_name, remedy=_AGAIN
            ) from None
        # Received for a session that another call has ended, and perhaps begun again, meanwhile.
        if session is not self._staged:
            raise RequestRefused("the session has ended", field="session", remedy=_AGAIN)
        session.update(found)
        self._version = body.weight_version
        return "Succeeded to update parameter online."

    def _session(self) -> dict[str, Tensor]:
        """Returns what the open session has received. Raises RequestRefused when none is open."""
        if self._staged is None:
            reason = "updates must run between begin_weight_update() and end_weight_update()"
            raise RequestRefused(reason, field="session", remedy="POST /begin_weight_update first")
        return self._staged

    def _receive(self, group: dist.ProcessGroup, bucket: Bucket) -> dict[str, Tensor]:
        flat = torch.empty(size_of(bucket), dtype=torch.uint8)
        tensors = dict(views(flat, bucket))
        dist.broadcast(flat, src=0, group=group)
        check_tensors(self._engine.model.module, tensors)
        return tensors

    async def end(self, _: Body) -> str:
        """Copies the staged tensors into the model. Raises RequestRefused when a part of the
        session failed.
        """
        staged = self._session()
        version = self._version
        self._staged = None
        if self._failure:
            reason = f"nothing was changed, an update of this session failed: {self._failure}"
            raise RequestRefused(reason, field="session", remedy=_AGAIN)
        if staged:
            await self._engine.run(
                lambda scheduler: scheduler.update_weights(staged, version), exclusive=True
            )
        return "Success"


async def _until_left(left: asyncio.Event, work: Callable[[], _T]) -> _T:
    """Returns the result of `work`, run in a thread. When the group is left, abandons the thread
    and raises RequestRefused.
    """
    done = forgettable(asyncio.wrap_future(in_daemon_thread(work, "weights")))
    gone = asyncio.create_task(left.wait())
    either: set[asyncio.Future[Any]] = {done, gone}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if done.done():
        return done.result()
    raise RequestRefused(
        "the group was destroyed meanwhile", field="group_name", remedy=_JOIN_AGAIN
    )


def add_distributed(app: FastAPI, engine: Engine) -> None:
    """Adds SGLang's calls that receive weights by broadcast and check weights."""
    updates = WeightUpdates(engine)
    add_call(app, "/init_weights_update_group", InitBody, updates.init)
    add_call(app, "/destroy_weights_update_group", GroupBody, updates.destroy)
    add_call(app, "/begin_weight_update", Body, updates.begin)
    add_call(app, "/update_weights_from_distributed", DistributedBody, updates.receive)
    add_call(app, "/end_weight_update", Body, updates.end)

    @app.post("/weights_checker", **described(CheckBody, OBJECT))
    async def weights_checker(request: Request) -> Response:
        """Checksums of the weights, by their Hugging Face names."""
        await read_body(request, CheckBody)
        sums = await engine.run(
            lambda _: {name: digest(tensor) for name, tensor in own_tensors(engine.model.module)}
        )
        return reply({"success": True, "ranks": [{"checksums": sums}]})
