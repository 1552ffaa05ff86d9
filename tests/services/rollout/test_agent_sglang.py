"""A node with real SGLang takes weights by every transport and recovers the newest after the kill
of any process."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.process.topology import TRAINER, Topology
from common.wire.schemas import Completion
from tests.support.engines.engines import (
    PLUGIN,
    SGLANG,
    expected_logprobs,
    sglang_is_installed,
    write_model,
)
from tests.support.engines.rollout_nodes import GROUP, TRAINER_PORT, Node, names
from tests.support.processes.waits import until
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher
from trainer.weights.transfer import Rendezvous

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"
    ),
]
ADDRESS = names(1)[f"{TRAINER}-0.{GROUP}"].address
PROMPT = [20, 21, 22, 23, 24, 25]
SETTINGS = {
    "RLHF_ROLLOUT__ENGINE": "sglang",
    "RLHF_ROLLOUT__DEVICE": "cpu",
    "RLHF_ROLLOUT__MAX_RUNNING_REQUESTS": "16",
    "RLHF_ROLLOUT__ENGINE_PYTHON": str(SGLANG / "bin" / "python"),
    "PYTHONPATH": str(PLUGIN),
}


class Rig:
    """One node with its router, and the publishing side of a trainer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.board = WeightBoard(directory / "published")
        self.node = Node(0, 1, directory, write_model(directory / "model", seed=0), **SETTINGS)
        self._broadcaster: Broadcaster | None = None

    def publish(self, way: str, version: int) -> None:
        """Publishes new random weights and waits until the node serves them."""
        new = write_model(self.directory / f"model-{version}", seed=version)
        static = [file for file in new.iterdir() if file.name != "model.safetensors"]
        common = (self.board, static, "run", 120.0)
        if way == "distributed":
            self._broadcaster = Broadcaster(*common, Rendezvous(ADDRESS), bucket_bytes=20_000)
        broadcaster = self._broadcaster if way == "distributed" else None
        publisher = Publisher(
            *common, lambda _: None, print, shared=way == "shared", broadcaster=broadcaster
        )
        publisher.publish(load_file(new / "model.safetensors").items(), version)

    def check_serves(self, version: int) -> None:
        """Checks that completions through the router come from these weights."""
        [completion] = asyncio.run(self._generate())
        assert [span[0] for span in completion.weight_versions] == [version]
        right = expected_logprobs(
            self.directory / f"model-{version}", None, PROMPT, completion.token_ids.tolist()
        )
        np.testing.assert_allclose(completion.logprobs, right, rtol=0, atol=1e-4)

    async def _generate(self) -> list[Completion]:
        async with RolloutClient("router", self.node.router_url, deadline_s=60) as client:
            return await client.generate(
                PROMPT, n=1, max_new_tokens=12, temperature=1, stop_token_ids=[]
            )

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, lambda: f"{self.said()}\n{what}", self.node.process)

    def said(self) -> str:
        """Returns the node's output without SGLang's log lines about health checks."""
        lines = self.node.output.read_text().splitlines()
        return "\n".join(line for line in lines if '"GET /health' not in line)

    def kill(self, process: psutil.Process, version: int) -> None:
        """Kills a process with SIGKILL; waits until a new engine serves these weights and is back
        in the router."""
        starts, family = self.starts(), self.engine_family()
        process.kill()
        self.until(lambda: self.starts() == starts + 1, "another engine was started")
        _, alive = psutil.wait_procs(family, timeout=400)
        assert alive == []
        self.until(self.node.healthy, "the node is healthy again")
        assert [(report.state, report.version) for report in self.board.workers()] == [
            ("ready", version)
        ]
        self.check_serves(version)

    def starts(self) -> int:
        return int(self.node.status()["engine_starts"])

    def engine_family(self) -> list[psutil.Process]:
        main = self.node.engine()
        return [main, *main.children(recursive=True)]

    def control(self, path: str, body: dict[str, str]) -> None:
        httpx.post(
            f"{self.node.engine_url}{path}", json=body, timeout=30, trust_env=False
        ).raise_for_status()

    def health_checks(self) -> int:
        """Counts the health checks by agent and router in SGLang's log."""
        return (
            (self.directory / "logs" / "rollout-server-0.engine.log")
            .read_text()
            .count("GET /health")
        )

    def end(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
        self.node.end()
        self.board.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    for name, value in Topology().loopback_env().items():
        monkeypatch.setenv(name, value)
    rig = Rig(tmp_path)
    try:
        with BackgroundServer(
            create_trainer_app(rig.board, Metrics("trainer")), ADDRESS, TRAINER_PORT
        ):
            rig.until(rig.node.healthy, "the node is healthy")
            yield rig
    finally:
        rig.end()


def test_real_sglang_takes_weights_by_every_way_and_comes_back_with_them(rig: Rig) -> None:
    """This is a single test because every start of SGLang takes half a minute."""
    rig.publish("shared", 1)
    rig.check_serves(1)
    assert (
        str(rig.board.directory)
        in httpx.get(f"{rig.node.engine_url}/model_info", trust_env=False).json()["model_path"]
    )
    rig.publish("distributed", 2)
    rig.check_serves(2)

    rig.control("/pause_generation", {"mode": "retract"})
    asked = rig.health_checks()
    while (
        rig.health_checks() < asked + 12
    ):  # some are the router's, which gives up after three failures
        assert rig.node.healthy(), "a paused engine stays in traffic"
        time.sleep(0.1)
    rig.control("/continue_generation", {})

    [scheduler] = [
        process for process in rig.engine_family() if "scheduler" in " ".join(process.cmdline())
    ]
    rig.kill(scheduler, 2)  # the trainer writes the files of these weights only now
    rig.publish("http", 3)
    rig.check_serves(3)
    rig.kill(rig.node.engine(), 3)
    command = rig.node.engine().cmdline()
    assert command[command.index("--weight-version") + 1] == "3"
