"""replay-buffer over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Query, Request, Response
from pydantic import Field

from common import wire
from common.errors import ServiceError
from common.observe import Metrics
from common.schemas import Group, GroupIds, Groups, PriorityUpdate, SampleRequest, TakeRequest, Text, Wire
from common.sections import ReplaySection
from services.http.app import create_app
from services.http.disconnect import cancel_on_disconnect
from services.http.openapi import described, errors
from services.replay.buffer import MAX_REWARD, Experience, ReplayBuffer, join, unpack_groups
from services.replay.shapes import GROUP, GROUPS, KINDS, SAMPLED, TAKEN
from services.replay.worker import Worker

_JSON = "application/json"


class ExperienceItem(Wire):
    """One answer without tokens."""

    prompt: Text
    response: Text
    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD)
    ground_truth: Text | None = None


class AddExperiences(Wire):
    """Body of `POST /add`."""

    experiences: list[ExperienceItem] = Field(min_length=1)


class Experiences(Wire):
    """Answer of `POST /sample`."""

    experiences: list[ExperienceItem]


class SampleExperiences(Wire):
    """Body of `POST /sample`."""

    batch_size: int = Field(4, gt=0, le=65536)
    prioritized: bool = False
    seed: int | None = Field(None, ge=0)


def create_replay_app(config: ReplaySection, state_dir: Path, max_body_bytes: int = 256 << 20) -> FastAPI:
    """The service over the store in `state_dir/replay`.

    Usable in process without its lifespan; the lifespan closes the store at the end. Raises ConfigError when the store
    cannot be used.
    """
    buffer = ReplayBuffer(config, state_dir / "replay" / "replay.db")
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
        flush=lambda: worker.call(buffer.flush),
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
    )
    app.state.worker = worker
    _queue_routes(app, worker)
    _reuse_routes(app, worker)
    _people_routes(app, worker)
    _lone_routes(app, worker)
    return app


def _queue_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.post("/groups", **described(GROUPS, reads=KINDS, fails=(415,)))
    async def add(request: Request) -> dict[str, int]:
        """Stores groups (msgpack, or JSON with arrays as lists); durable when this answers, idempotent by id."""
        added = await worker.add(await _read_groups(request))
        return {"added": added.added, "duplicates": added.duplicates}

    @app.post("/groups/take", **described(answer=TAKEN, writes=KINDS))
    async def take(body: TakeRequest, request: Request) -> Response:
        """Fresh groups, each handed out exactly once and leased until acknowledged."""
        taken = await cancel_on_disconnect(request, worker.take(body), drain=True)
        return await _answer(request, taken.blobs, evicted=taken.evicted)

    @app.post("/groups/ack", responses=errors(404))
    async def ack(body: GroupIds) -> dict[str, int]:
        """These groups were trained on. Repeating it changes nothing; an unknown id is a 404 and nothing is changed."""
        return {"acknowledged": await worker.call(buffer.ack, body.ids)}

    @app.post("/groups/reset_fresh")
    async def reset_fresh(from_position: Annotated[int | None, Query(ge=0, lt=2**53)] = None) -> dict[str, int]:
        """Drops all groups that were not acknowledged, and with `from_position` all from there on in the prompt stream."""
        return {"dropped": await worker.call(buffer.reset_fresh, from_position)}


def _reuse_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.post("/groups/sample", **described(answer=SAMPLED, writes=KINDS))
    async def sample(body: SampleRequest, request: Request) -> Response:
        """Acknowledged groups by priority, with importance weights."""
        sampled = await worker.call(buffer.sample, body)
        return await _answer(request, sampled.blobs, weights=sampled.weights)

    @app.post("/groups/priorities")
    async def priorities(body: PriorityUpdate) -> dict[str, int]:
        """Priorities for sampling; ids that are not here are skipped."""
        return {"updated": await worker.call(buffer.set_priorities, body)}


def _people_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.get("/groups")
    async def listing(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        state: Literal["fresh", "leased", "consumed"] | None = None,
    ) -> dict[str, Any]:
        """What is stored, without contents; with `state` only what is in that one."""
        return {"groups": await worker.call(buffer.listing, limit, offset, state)}

    @app.get("/groups/{group_id:path}", **described(answer=GROUP, fails=(404,)))
    async def group(group_id: str) -> Response:
        """One group, arrays as lists."""
        found = await worker.call(buffer.group, group_id)
        return Response(orjson.dumps(wire.group_json(found)), media_type=_JSON)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Counts and means."""
        return await worker.call(buffer.stats) | {"load": app.state.load.stats()}

    @app.post("/clear")
    async def clear() -> dict[str, str]:
        """Forgets everything stored."""
        await worker.call(buffer.clear)
        return {"status": "cleared"}


def _lone_routes(app: FastAPI, worker: Worker) -> None:
    buffer = worker.buffer

    @app.post("/add")
    async def add_experiences(body: AddExperiences) -> dict[str, int]:
        """Stores answers without tokens. They can be read and sampled here, and are never handed out for training."""
        items = [Experience(item.prompt, item.response, item.reward, item.ground_truth) for item in body.experiences]
        size = await worker.call(buffer.add_experiences, items)
        return {"added": len(items), "buffer_size": size}

    @app.post("/sample", response_model=Experiences)
    async def sample_experiences(body: SampleExperiences) -> Response:
        """Up to `batch_size` different answers, those of groups included; `prioritized` prefers higher rewards."""
        found = await worker.call(buffer.sample_experiences, body.batch_size, body.prioritized, body.seed)
        return Response(orjson.dumps({"experiences": [asdict(item) for item in found]}), media_type=_JSON)


async def _read_groups(request: Request) -> list[Group]:
    """The groups of a body. Raises ServiceError (415) for another content type and InvalidInput for a bad body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (wire.MSGPACK, _JSON):
        raise ServiceError(
            "groups come as msgpack or JSON",
            code="unsupported_media_type",
            status=415,
            field="content-type",
            value=kind,
            remedy=f"send {wire.MSGPACK} or {_JSON}",
        )
    decode = wire.decode if kind == wire.MSGPACK else wire.decode_json
    return (await asyncio.to_thread(decode, await request.body(), Groups)).groups


async def _answer(request: Request, blobs: list[bytes], **extra: Any) -> Response:
    """Groups as msgpack for programs that ask for it, else as JSON."""
    if wire.MSGPACK in request.headers.get("accept", ""):
        return Response(join(blobs, **extra), media_type=wire.MSGPACK)
    return Response(await asyncio.to_thread(_as_json, blobs, extra), media_type=_JSON)


def _as_json(blobs: list[bytes], extra: dict[str, Any]) -> bytes:
    groups = [wire.group_json(group) for group in unpack_groups(blobs)]
    return orjson.dumps({"groups": groups, **extra}, option=orjson.OPT_SERIALIZE_NUMPY)


def _gauges(metrics: Metrics, buffer: ReplayBuffer) -> None:
    """What /metrics says of the buffer, read when it is asked for."""
    groups = metrics.gauge("replay_groups", "Groups stored", ["state"])
    completions = metrics.gauge("replay_completions", "Completions stored; lone: experiences without tokens", ["state"])

    def read(state: str, column: int) -> float:
        return buffer.store.committed[state][column]

    for state in buffer.store.committed:
        groups.labels(state).set_function(partial(read, state, 0))
        completions.labels(state).set_function(partial(read, state, 1))
    metrics.gauge("replay_completions_limit", "Completions that may be stored").set(buffer.capacity)
    metrics.gauge("replay_store_bytes", "The file and its log on disk").set_function(buffer.store.size)
