"""The calls that load new weights into SGLang match the recordings in `tests/golden`, in order and
with their bodies.

The agent's own code makes the calls; the engine is a stand-in that refuses the same calls as SGLang
0.5.21. Where real SGLang is installed, `tests/contract` and `test_agent_sglang.py` test it.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import torch

from common.process.metrics import Metrics
from common.wire.schemas import WeightManifest, WorkerReport
from learning.weight_group import digest
from services.rollout.engine_client import EngineClient
from services.rollout.weights.receive import BroadcastReceiver
from services.rollout.weights.trainer_client import TrainerClient
from tests.support.engines.strict_sglang import StrictSGLang
from tests.support.paths import ROOT
from trainer.backends.server import create_trainer_app
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.transfer import EngineGroup, Rendezvous

GOLDEN = ROOT / "tests" / "golden" / "sglang_calls.json"
NAME = "rollout-server-0"


def recorded(engine: StrictSGLang, **names: str) -> list[dict[str, Any]]:
    """Returns the calls without the values that differ between runs."""
    text = json.dumps(engine.recorded)
    for name, value in names.items():
        text = text.replace(json.dumps(value), json.dumps(f"<{name}>"))
    calls: list[dict[str, Any]] = json.loads(text)
    engine.recorded.clear()
    return [call | {"master_port": "<port>"} if "master_port" in call else call for call in calls]


def assert_golden(key: str, calls: list[dict[str, Any]]) -> None:
    assert calls == json.loads(GOLDEN.read_text())[key]


def client(engine: StrictSGLang) -> EngineClient:
    return EngineClient("engine", "http://engine", transport=httpx.ASGITransport(engine.app))


async def test_a_broadcast_pauses_joins_once_sends_bucket_by_bucket_checks_and_continues(
    tmp_path: Path,
) -> None:
    weights = {
        f"model.layers.{layer}.mlp.down_proj.weight": torch.full((4, 8), float(layer))
        for layer in range(3)
    }
    engine = StrictSGLang({name: digest(tensor) for name, tensor in weights.items()})
    board = WeightBoard(tmp_path / "weights")
    sender = Broadcaster(board, [], "run", 5.0, Rendezvous("127.0.0.1"), bucket_bytes=200)
    transport = httpx.ASGITransport(create_trainer_app(board, Metrics("trainer")))
    member = WorkerReport(
        name=NAME, url="", num_nodes=1, state="ready", version=None, tensor_parallel_size=2
    )
    group = EngineGroup([member], Rendezvous("127.0.0.1"), 5.0)
    async with (
        client(engine) as api,
        TrainerClient("trainer", "http://trainer", transport=transport) as trainer,
    ):
        receiver = BroadcastReceiver(NAME, api, trainer)
        for version in (1, 2):
            sender.publish(
                weights.items(), version
            )  # has no receiver: the stand-in joins no torch group
            manifest = WeightManifest(
                version=version, run_id="run", broadcast=group.announcement(sender._copy.buckets)
            )
            board.announce(manifest)
            assert manifest.broadcast is not None
            await receiver.receive(manifest, manifest.broadcast)
            assert_golden(f"broadcast {version}", recorded(engine, group=group.name))
    group.close()


async def test_files_are_loaded_in_a_pause(tmp_path: Path) -> None:
    engine = StrictSGLang({})
    async with client(engine) as api:
        await api.load(tmp_path, "7", timeout_s=30)
    assert_golden("files", recorded(engine, directory=str(tmp_path)))


async def test_an_adapter_is_loaded_beside_the_older_ones(tmp_path: Path) -> None:
    engine = StrictSGLang({})
    async with client(engine) as api:
        for version in (1, 2, 3):
            await api.load_adapter(
                tmp_path, WeightManifest(version=version, run_id="run", kind="adapter"), 2, 30
            )
    assert_golden("adapters", recorded(engine, directory=str(tmp_path)))


async def test_an_engine_that_was_left_in_a_session_is_cleaned_up(tmp_path: Path) -> None:
    engine = StrictSGLang({})
    group = EngineGroup(
        [WorkerReport(name=NAME, url="", num_nodes=1, state="ready", version=None)],
        Rendezvous("127.0.0.1"),
        5.0,
    )
    async with client(engine) as api, TrainerClient("trainer", "http://nobody.invalid") as trainer:
        await BroadcastReceiver(NAME, api, trainer).abandon(group.announcement([]))
    assert_golden("abandoned", recorded(engine, group=group.name))
    group.close()
