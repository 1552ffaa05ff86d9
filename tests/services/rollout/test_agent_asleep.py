"""SGLang and the trainer take turns on one GPU: the calls follow SGLang's source, as SGLang needs a
GPU to run them.

Its scheduler shows that a release needs a paused or idle engine. Resuming a kind of memory that was
not released, or resuming it twice, ends the process. Weights come back without values. Both calls
answer `null`.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ServiceError
from common.process.topology import Topology
from common.settings.config import load
from common.wire.schemas import WeightManifest, adapter_name
from services.rollout.engine_client import EngineClient, engine_command, released_memory
from services.rollout.state import NodeState
from services.rollout.weights.trainer_client import WeightId
from tests.support.engines.strict_sglang import StrictSGLang

LIMIT_S = 10.0
PAUSE = {"call": "/pause_generation", "mode": "retract"}
CONTINUE = {"call": "/continue_generation"}


def released(*tags: str) -> dict[str, Any]:
    return {"call": "/release_memory_occupation", "tags": list(tags)}


def resumed(*tags: str) -> dict[str, Any]:
    return {"call": "/resume_memory_occupation", "tags": list(tags)}


def changes(sglang: StrictSGLang) -> list[dict[str, Any]]:
    """Returns the recorded calls that change something."""
    return [call for call in sglang.recorded if call["call"].startswith("/")]


@pytest.fixture
def sglang() -> StrictSGLang:
    return StrictSGLang({})


@pytest.fixture
async def client(sglang: StrictSGLang) -> AsyncIterator[EngineClient]:
    async with EngineClient(
        "engine", "http://e", transport=httpx.ASGITransport(sglang.app), deadline_s=1
    ) as client:
        yield client


async def test_two_turns_as_recorded(
    client: EngineClient, sglang: StrictSGLang, tmp_path: Path
) -> None:
    memory = released_memory(load(["--rollout.colocate", "true"], {}))
    for version in ("1", "2"):
        sglang.recorded.clear()
        await client.sleep(memory, LIMIT_S)
        await client.load(tmp_path, version, LIMIT_S)
        loaded = {"model_path": str(tmp_path), "weight_version": version, "flush_cache": True}
        assert changes(sglang) == [
            PAUSE,
            released("kv_cache", "weights"),
            resumed("weights"),
            {"call": "/update_weights_from_disk", **loaded},
            resumed("kv_cache"),
            CONTINUE,
        ]
        assert (sglang.ended, sglang.offloaded) == ("", set())


async def test_awake_engine_is_loaded_as_usual(
    client: EngineClient, sglang: StrictSGLang, tmp_path: Path
) -> None:
    await client.load(tmp_path, "1", LIMIT_S)
    paths = [call["call"] for call in changes(sglang)]
    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


async def test_an_adapter_leaves_the_base_model_where_it_is(
    client: EngineClient, sglang: StrictSGLang, tmp_path: Path
) -> None:
    memory = released_memory(load(["--rollout.colocate", "true", "--lora.rank", "4"], {}))
    await client.sleep(memory, LIMIT_S)
    await client.load_adapter(
        tmp_path, WeightManifest(version=1, run_id="run", kind="adapter"), 2, LIMIT_S
    )
    adapter = {
        "call": "/load_lora_adapter",
        "lora_name": adapter_name("run", 1),
        "lora_path": str(tmp_path),
    }
    assert changes(sglang) == [PAUSE, released("kv_cache"), resumed("kv_cache"), CONTINUE, adapter]
    assert sglang.ended == ""


@pytest.mark.parametrize(
    "step", ["release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk"]
)
async def test_a_refused_step_is_not_repeated_and_does_not_continue(
    client: EngineClient, sglang: StrictSGLang, tmp_path: Path, step: str
) -> None:
    """A second release or resume would end SGLang, and so would continuing without memory."""
    sglang.refused = f"/{step}"

    async def turn() -> None:
        await client.sleep(["kv_cache", "weights"], LIMIT_S)
        await client.load(tmp_path, "1", LIMIT_S)

    with pytest.raises(ServiceError, match="out of memory"):
        await turn()
    assert [call["call"] for call in changes(sglang)].count(f"/{step}") == 1
    assert CONTINUE not in sglang.recorded
    assert sglang.ended == ""


def test_the_engine_is_started_with_the_memory_saver(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    words = ["--rollout.engine_python", str(python)]
    apart = engine_command(load(words, {}), Topology(), "m", "default")
    together = engine_command(
        load([*words, "--rollout.colocate", "true"], {}), Topology(), "m", "default"
    )
    assert [word for word in together if word not in apart] == ["--enable-memory-saver"]
    assert released_memory(load([], {})) == []
    merged = load(
        ["--rollout.colocate", "true", "--lora.rank", "4", "--lora.publish", "merged"], {}
    )
    assert released_memory(merged) == ["kv_cache", "weights"]


def test_the_state_of_a_sleeping_node() -> None:
    state, told = NodeState(), list[str]()
    state.engine_up(WeightId("run", 1))
    state.asleep = True
    told.append(state.worker_state)
    assert state.in_traffic  # true: requests wait in the engine
    state.engine_down("killed")
    told.append(state.worker_state)
    state.asleep = True  # it waits for its turn to be started again
    told.append(state.worker_state)
    assert told == ["asleep", "failed", "asleep"]
