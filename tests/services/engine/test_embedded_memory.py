"""An engine that gives its memory to a trainer: SGLang's calls, and refusals where SGLang would
exit."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ServiceError
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.rollout.engine_client import EngineClient, LoadFailed
from tests.support.engines.engines import write_adapter, write_model
from tests.support.engines.held_engine import held

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "temperature": 0.0}}
LIMIT_S = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def engine(directory: Path) -> Engine:
    """Returns an engine whose weights have their own memory and whose KV cache has a fixed size, as
    on a GPU."""
    engine = Engine(Model(directory, 64), max_running=4)
    for parameter in engine.model.module.parameters():
        parameter.data = parameter.data.clone()
    engine.model.cache.allocate(4, 64)
    return engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    app = make_app(engine)
    async with (
        app.router.lifespan_context(app),
        EngineClient("engine", "http://e", transport=httpx.ASGITransport(app)) as client,
    ):
        yield client


async def _ids(client: EngineClient) -> Any:
    return (await client.http.post("/generate", json=BODY)).json()["output_ids"]


def _held(engine: Engine) -> tuple[int, int]:
    """Returns the bytes of KV cache and weights."""
    cache, weights = engine.model.cache.tensors(), engine.model.module.state_dict().values()
    kv, model = ({t.untyped_storage().nbytes() for t in tensors} for tensors in (cache, weights))
    return sum(kv), sum(model)


async def test_a_sleeping_engine_holds_no_memory_and_wakes_up_with_weights(
    engine: Engine, client: EngineClient, directory: Path
) -> None:
    before, (kv, model) = await _ids(client), _held(engine)
    assert min(kv, model) > 0
    await client.sleep(["kv_cache", "weights"], LIMIT_S)
    assert _held(engine) == (0, 0)
    assert client.asleep == ["kv_cache", "weights"]
    await client.load(directory, "3", LIMIT_S)
    assert _held(engine) == (kv, model)
    assert client.asleep == []
    assert await _ids(client) == before
    assert await client.weight_version() == "3"


async def test_requests_wait_while_it_sleeps_and_run_afterwards(
    engine: Engine, client: EngineClient, directory: Path
) -> None:
    before = await _ids(client)
    long = BODY | {"sampling_params": {"max_new_tokens": 50, "temperature": 0.0}}
    with held(engine):
        running = asyncio.create_task(client.http.post("/generate", json=long))
        await _until(lambda: engine.running > 0)
        sleeping = asyncio.create_task(client.sleep(["kv_cache", "weights"], LIMIT_S))
        await _until(lambda: bool(engine._calls))
    await sleeping  # the running request is queued again
    waiting = asyncio.create_task(client.http.post("/generate", json=BODY))
    await _until(lambda: engine.waiting == 2)
    assert not running.done()
    await client.load(directory, "3", LIMIT_S)
    assert (await waiting).json()["output_ids"] == before
    answer = (await running).json()
    assert answer["output_ids"][:6] == before
    assert answer["meta_info"]["num_retractions"] == 1


async def test_only_the_cache_sleeps_where_adapters_are_served(
    engine: Engine, client: EngineClient, directory: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a", directory, seed=1)
    await client.http.post(
        "/load_lora_adapter", json={"lora_name": "a", "lora_path": str(tmp_path / "a")}
    )
    _, model = _held(engine)
    with pytest.raises(LoadFailed, match="adapters depend on these weights"):
        await client.sleep(["kv_cache", "weights"], LIMIT_S)
    await client.sleep(["kv_cache"], LIMIT_S)
    assert _held(engine) == (0, model)


async def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        await asyncio.sleep(0)


async def _refused(client: EngineClient, path: str, body: object) -> str:
    response = await client.http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.text


async def test_calls_that_would_end_sglang_are_refused(
    engine: Engine, client: EngineClient, directory: Path
) -> None:
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    assert "was not released" in await _refused(client, resume, {"tags": ["kv_cache"]})
    assert "tags" in await _refused(client, release, {"tags": ["everything"]})
    assert (await client.http.post(release, json={})).is_success  # takes both kinds of memory
    assert "already released" in await _refused(client, release, {"tags": ["weights"]})
    assert "needs" in await _refused(client, "/continue_generation", {})
    assert "memory of the weights is released" in await _refused(
        client, "/update_weights_from_disk", {"model_path": str(directory)}
    )
    await client.http.post(resume, json={})
    assert "load the weights" in await _refused(
        client, "/continue_generation", {}
    )  # the weights hold no values
    await client.load(directory, "1", LIMIT_S)
    assert len(await _ids(client)) == 6


async def test_bad_weights_leave_the_engine_asleep(client: EngineClient, tmp_path: Path) -> None:
    await client.sleep(["kv_cache", "weights"], LIMIT_S)
    with pytest.raises(ServiceError, match="cannot be read"):
        await client.load(tmp_path / "nothing", "3", LIMIT_S)
    assert client.asleep == ["kv_cache"]  # the agent starts it again
    load = (await client.http.get("/server_info")).json()["internal_states"][0]
    assert load["paused"] is True


def test_growing_cache_is_simply_emptied(directory: Path) -> None:
    model = Model(directory, 64)
    model.reserve(4)
    assert model.storages("kv_cache") == []
    assert model.cache.tensors() == []
