"""HTTP API of the replay-buffer."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from common import Json
from common.errors import ServiceError
from common.process import logs
from common.process.metrics import Metrics
from common.settings.sections import ReplaySection
from common.wire import codec
from common.wire.schemas import (
    MAX_LISTED,
    AtMost,
    Group,
    GroupIds,
    Groups,
    PriorityUpdate,
    SampledGroups,
    SampleRequest,
    TakenGroups,
    TakeRequest,
    Wire,
)
from services.http.app import Service, create_app, read_model
from services.http.disconnect import cancel_on_disconnect
from services.http.openapi import JSON, described, errors, struct_schema
from services.replay.buffer import Experience, ReplayBuffer, join, unpack_groups
from services.replay.worker import Worker

log = logging.getLogger(__name__)
_KINDS = (JSON, codec.MSGPACK)
"""In msgpack, arrays of numbers are raw little-endian bytes, 4 bytes per number."""
_EXAMPLE = {
    "id": "run-1-000017",
    "prompt_id": "gsm8k-17",
    "prompt": "2 + 3 = ?",
    "ground_truth": "5",
    "prompt_token_ids": [11, 12, 13],
    "completions": [
        {
            "token_ids": [21, 2],
            "logprobs": [-0.3, -0.1],
            "text": "5",
            "finish_reason": "stop",
            "weight_versions": [[3, 0, 2]],
            "reward": 1.0,
            "correct": True,
        }
    ],
}
Position = Annotated[int, Query(ge=0, lt=2**53)]
Limit = Annotated[int, Query(ge=1, le=1000)]
RunId = Annotated[str, Query(max_length=128)]
_GROUPS = struct_schema(Groups) | {"examples": [{"groups": [_EXAMPLE]}]}


class AddExperiences(Wire):
    """Body of `POST /add`."""

    experiences: Annotated[list[Experience], Field(min_length=1), AtMost(MAX_LISTED)]


class Experiences(Wire):
    """Answer of `POST /sample`."""

    experiences: Annotated[list[Experience], AtMost(MAX_LISTED)]


class SampleExperiences(Wire):
    """Body of `POST /sample`."""

    batch_size: int = Field(4, gt=0, le=65536)
    prioritized: bool = False
    seed: int | None = Field(None, ge=0)


def create_replay_app(
    config: ReplaySection, state_dir: Path, max_body_bytes: int = 256 << 20
) -> FastAPI:
    """Creates the app for the store in `state_dir/replay`.

    Without its lifespan the app still works in process, but nothing closes the store. Raises
    ConfigError when the store cannot be used.
    """
    # Looked up now: a simulation replaces the clock after this module was imported.
    buffer = ReplayBuffer(config, state_dir / "replay" / "replay.db", clock=time.monotonic)
    worker = Worker(buffer)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await worker.close()

    metrics = Metrics("replay-buffer")
    _gauges(metrics, buffer)
    app = create_app(
        "replay-buffer",
        flush=lambda: worker.call(buffer.store.flush),
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        store=buffer.store,
    )
    app.state.worker = worker
    app.state.run = ""
    _queue_routes(app, worker)
    _reuse_routes(app, worker)
    _inspection_routes(app, worker)
    _experience_routes(app, worker)
    return app


def _queue_routes(app: Service, worker: Worker) -> None:
    """Adds the calls of every group, as bare routes, and the one that begins a run."""
    buffer = worker.buffer

    async def add(request: Request) -> Response:
        """Stores groups (msgpack, or JSON with arrays as lists), durable when this answers;
        idempotent by id.
        """
        added = await worker.add(await _read_groups(request))
        request.app.state.run = logs.run_id()
        return JSONResponse(added)

    async def take(request: Request) -> Response:
        """Fresh groups, each handed out exactly once and leased until acknowledged."""
        body = await read_model(request, TakeRequest)
        taken = await cancel_on_disconnect(request, worker.take(body), drain=True)
        if taken.ids:
            _note(request, f"{len(taken.ids)} groups were taken")
        return await _answer(request, taken.blobs, ids=taken.ids, evicted=taken.evicted)

    async def ack(request: Request) -> Response:
        """Marks groups as trained on. Repeating the call changes nothing, nor does an unknown id,
        which gives a 404.
        """
        body = await read_model(request, GroupIds)
        return JSONResponse({"acknowledged": await worker.call_of_run(buffer.store.ack, body.ids)})

    counts = {"response_model": dict[str, int]}
    app.add_bare_route("/groups", add, **counts, **described(_GROUPS, reads=_KINDS, fails=(409,)))
    app.add_bare_route(
        "/groups/take",
        take,
        **described(TakeRequest, struct_schema(TakenGroups), writes=_KINDS, fails=(409,)),
    )
    app.add_bare_route("/groups/ack", ack, **counts, **described(GroupIds, fails=(404, 409)))

    @app.post("/groups/reset_fresh", responses=errors(409))
    async def reset_fresh(
        request: Request,
        from_position: Position | None = None,
        step: Position | None = None,
        run_id: RunId = "",
    ) -> dict[str, int]:
        """Drops all unacknowledged groups and, with `from_position`, all groups from that
        prompt-stream position on.

        With `step`, samples drawn in that step or later no longer count. With `run_id` that run
        begins: a copy of the call changes nothing, and calls of the runs before it are refused.
        """
        dropped = await worker.call(buffer.reset_fresh, from_position, step, run_id)
        if dropped:
            _note(request, f"{dropped} groups were dropped (reset_fresh)")
        return {"dropped": dropped}


def _reuse_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.post(
        "/groups/sample",
        **described(answer=struct_schema(SampledGroups), writes=_KINDS, fails=(409,)),
    )
    async def sample(body: SampleRequest, request: Request) -> Response:
        """Acknowledged groups by priority, with importance weights."""
        sampled = await worker.call_of_run(buffer.sample, body)
        return await _answer(request, sampled.blobs, weights=sampled.weights)

    @app.post("/groups/priorities", responses=errors(409))
    async def priorities(body: PriorityUpdate) -> dict[str, int]:
        """Sets priorities for sampling; unknown ids are skipped."""
        return {"updated": await worker.call_of_run(buffer.set_priorities, body)}


def _inspection_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.get("/groups")
    async def listing(
        limit: Limit = 100,
        offset: Position = 0,
        state: Literal["fresh", "leased", "consumed"] | None = None,
    ) -> Json:
        """Lists the stored groups without their contents, optionally only those in one state."""
        return {"groups": await worker.call(buffer.store.listing, limit, offset, state)}

    @app.get("/groups/{group_id:path}", **described(answer=struct_schema(Group), fails=(404,)))
    async def group(group_id: str) -> Response:
        """One group, arrays as lists."""
        found = await worker.call(buffer.group, group_id)
        return Response(orjson.dumps(codec.plain(found)), media_type=JSON)

    @app.get("/stats")
    async def stats() -> Json:
        """Counts and means."""
        return await worker.call(buffer.stats) | {"load": app.state.load.stats()}

    @app.post("/clear")
    async def clear(request: Request) -> dict[str, str]:
        """Forgets everything stored."""
        stored = sum(groups for groups, _ in buffer.store.committed.values())
        await worker.call(buffer.store.clear)
        _note(request, f"everything was forgotten, {stored} groups (clear)")
        return {"status": "cleared"}


def _experience_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.post("/add")
    async def add_experiences(body: AddExperiences) -> dict[str, int]:
        """Stores completions without tokens. They can be read and sampled here but are never used
        for training.
        """
        size = await worker.call(buffer.add_experiences, body.experiences)
        return {"added": len(body.experiences), "buffer_size": size}

    @app.post("/sample")
    async def sample_experiences(body: SampleExperiences) -> Experiences:
        """Up to `batch_size` distinct completions, those of groups included; `prioritized` prefers
        higher rewards.
        """
        found = await worker.call(
            buffer.sample_experiences, body.batch_size, body.prioritized, body.seed
        )
        return Experiences(experiences=found)


def _note(request: Request, what: str) -> None:
    """Logs a call that changes the stored groups; a warning when another run than the one storing
    groups made it.
    """
    run = logs.run_id()
    peer = request.client
    storing = request.app.state.run
    level = logging.INFO
    if run == storing:
        level = logging.DEBUG
    elif storing:
        level = logging.WARNING
    who = f"{peer.host}:{peer.port}" if peer else "this process"
    caller = f"{who}, run {run or 'unknown'}, request {logs.request_id()}"
    log.log(level, "%s by %s", what, caller)


async def _read_groups(request: Request) -> list[Group]:
    """Decodes the groups of a body. Raises ServiceError (415) for other content types, InvalidInput
    for a bad body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _KINDS:
        raise ServiceError(
            "groups come as msgpack or JSON",
            code="unsupported_media_type",
            status=415,
            field="content-type",
            value=kind,
            remedy=f"send {codec.MSGPACK} or {JSON}",
        )
    decode = codec.decode if kind == codec.MSGPACK else codec.decode_json
    body = await request.body()
    content = await asyncio.to_thread(decode, body, Groups)
    return content.groups


async def _answer(request: Request, blobs: list[bytes], **extra: Any) -> Response:
    """Returns groups as msgpack for clients that accept it, else as JSON."""
    if codec.MSGPACK in request.headers.get("accept", ""):
        return Response(join(blobs, **extra), media_type=codec.MSGPACK)
    return Response(await asyncio.to_thread(_as_json, blobs, extra), media_type=JSON)


def _as_json(blobs: list[bytes], extra: Json) -> bytes:
    groups = [codec.plain(group) for group in unpack_groups(blobs)]
    return orjson.dumps({"groups": groups, **extra}, option=orjson.OPT_SERIALIZE_NUMPY)


def _gauges(metrics: Metrics, buffer: ReplayBuffer) -> None:
    """Adds the gauges of the buffer; each is computed when /metrics is requested."""
    groups = metrics.gauge("replay_groups", "Groups stored", ["state"])
    completions = metrics.gauge(
        "replay_completions", "Completions stored; `lone`: single answers without tokens", ["state"]
    )

    def read(state: str, column: int) -> float:
        return buffer.store.committed[state][column]

    for state in buffer.store.committed:
        groups.labels(state).set_function(partial(read, state, 0))
        completions.labels(state).set_function(partial(read, state, 1))
    metrics.gauge("replay_completions_limit", "Completions that may be stored").set(buffer.capacity)
    metrics.gauge("replay_store_bytes", "The file and its log on disk").set_function(
        buffer.store.size
    )
