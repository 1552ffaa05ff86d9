"""Engines of real SGLang with several processes, which share the weights in all the ways that a
broadcast may meet.

On a CPU SGLang cannot generate with expert parallelism, so these engines only take weights.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.process.metrics import Metrics
from common.settings.sections import RolloutSection
from common.wire.schemas import WorkerReport
from services.rollout.engine_client import EngineClient
from services.rollout.weights.receive import BroadcastReceiver
from services.rollout.weights.trainer_client import TrainerClient
from tests.support.engines.engines import sglang_is_installed, sglang_process
from tests.support.models.tiny_models import write
from trainer.backends.server import create_trainer_app
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.comparison import Checksums
from trainer.weights.layouts import Sharding
from trainer.weights.transfer import Rendezvous

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.usefixtures("on_loopback"),
    pytest.mark.skipif(
        not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"
    ),
]
NAME = "rollout-server-0"
FORMS = [
    (2, []),
    (2, ["--ep-size", "2"]),
    (2, ["--enable-dp-attention", "--dp-size", "2"]),
]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize(("size", "words"), FORMS, ids=str)
async def test_contract_every_rank_takes_its_share_of_a_broadcast_and_is_verified(
    size: int, words: list[str], model_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    directory = write("Qwen3-MoE", tmp_path / "model", num_experts=4)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory)
    old = load_file(directory / "model.safetensors")
    new = {name: tensor + torch.randn_like(tensor) / 10 for name, tensor in old.items()}

    rollout = RolloutSection(tensor_parallel_size=size, engine_args=words)
    sharding = Sharding(rollout.expert_groups, rollout.attention_groups)
    board = WeightBoard(tmp_path / "published")
    report = WorkerReport(
        name=NAME, url="", num_nodes=1, state="ready", version=None, tensor_parallel_size=size
    )
    broadcaster = Broadcaster(
        board, [], "run", 300.0, Rendezvous("127.0.0.1", sharding=sharding), bucket_bytes=20_000
    )
    transport = httpx.ASGITransport(create_trainer_app(board, Metrics("trainer")))
    running = sglang_process(
        directory,
        tmp_path / "log",
        "7",
        max_new_tokens=24,
        tensor_parallel_size=size,
        engine_args=words,
    )
    with running as url:
        async with (
            EngineClient("engine", url) as engine,
            TrainerClient("trainer", "http://trainer", transport=transport) as trainer,
        ):
            first = await engine.checksums(60)
            board.report(report)  # now: a node that is silent for long counts as gone
            publishing = pool.submit(broadcaster.publish, new.items(), 1)
            manifest = await trainer.latest(None, wait_s=60, deadline_s=90)
            assert manifest is not None
            assert manifest.broadcast is not None
            assert manifest.broadcast.world_size == 1 + size
            receiver = BroadcastReceiver(NAME, engine, trainer)
            await receiver.receive(manifest, manifest.broadcast)
            publishing.result(60)
            then = await engine.checksums(60)
            assert await engine.weight_version() == "1"
            broadcaster.close()
            await receiver.abandon(manifest.broadcast)

    assert len(first) == len(then) == size
    for weights, ranks, others in ((old, first, then), (new, then, first)):
        found = Checksums(False, sharding).compare(weights, ranks)
        assert (found.problem, found.compared, found.unseen) == (None, len(weights), [])
        assert Checksums(False, sharding).compare(weights, others).wrong
    if sharding != Sharding():
        assert Checksums(False).compare(old, first).wrong  # shares of another kind
