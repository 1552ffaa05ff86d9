"""The versions of the engine's libraries: asked of its own Python by the agent, compared by the
trainer before weights are broadcast."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.process.metrics import Metrics
from common.process.topology import Topology
from common.settings.config import Config
from common.wire.schemas import WorkerReport
from services.rollout.engine_client import engine_libraries
from services.rollout.first_node import FirstNodeAgent
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.transfer import Rendezvous


def settings(folder: Path, script: str, **trainer: str) -> Config:
    """Settings whose engine's Python is a shell script."""
    python = folder / "engine-python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    return Config.model_validate(
        {
            "rollout": {"engine": "sglang", "engine_python": str(python)},
            "trainer": {"weight_sync": "distributed", **trainer},
            "state_dir": str(folder / "state"),
        }
    )


async def reported(config: Config) -> WorkerReport:
    """What the trainer gets from the agent of an engine that is about to start."""
    agent = FirstNodeAgent(config, Topology(), Metrics("rollout"))
    await agent._launch_engine()
    await agent._router_api.close()
    return WorkerReport.model_validate_json(agent.report().model_dump_json())


def broadcaster(folder: Path, report: WorkerReport, own: str) -> Broadcaster:
    board = WeightBoard(folder / "weights")
    board.report(report)
    return Broadcaster(board, [], "run", 5.0, Rendezvous("127.0.0.1", nccl=own))


async def test_another_nccl_is_refused_before_any_weights_are_announced(tmp_path: Path) -> None:
    report = await reported(settings(tmp_path, 'echo "2.13.0+cu130 2.30.7"'))
    sender = broadcaster(tmp_path, report, "2.29.7")
    with pytest.raises(ConfigError) as caught:
        sender.publish([], 1)
    assert (caught.value.field, caught.value.value) == ("trainer.weight_sync", "distributed")
    assert "image" in str(caught.value.remedy)
    for part in ("2.30.7", "2.29.7", "2.13.0+cu130", report.name):
        assert part in caught.value.message
    assert sender._board.latest() is None


async def test_the_same_nccl_is_accepted_and_gloo_has_none(tmp_path: Path) -> None:
    report = await reported(settings(tmp_path, 'echo "2.13.0 2.30.7"'))
    for own in ("2.30.7", ""):
        broadcaster(tmp_path, report, own).refuse_other_nccl()


async def test_nothing_is_asked_where_weights_are_files(tmp_path: Path) -> None:
    report = await reported(settings(tmp_path, "touch $0.ran", weight_sync="http"))
    assert report.libraries is None
    assert not (tmp_path / "engine-python.ran").exists()


@pytest.mark.parametrize(
    "script",
    ["echo ModuleNotFoundError: No module named torch >&2; exit 1", "echo 2.13.0", "exit 0"],
)
def test_a_python_without_nccl_is_named(tmp_path: Path, script: str) -> None:
    config = settings(tmp_path, script)
    with pytest.raises(ConfigError) as caught:
        engine_libraries(config)
    assert caught.value.field == "rollout.engine_python"
    assert caught.value.value == str(tmp_path / "engine-python")
    assert caught.value.remedy
