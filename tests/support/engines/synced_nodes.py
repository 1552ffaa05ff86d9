"""Rollout nodes with the trainer's own publisher, for every way to bring weights into engines."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from torch import Tensor

from common.process.metrics import Metrics
from common.process.topology import TRAINER
from common.wire.schemas import Broadcast, WorkerReport
from learning.weight_group import digest
from tests.support.engines.rollout_nodes import GROUP, TRAINER_PORT, Cluster, Node, names
from tests.support.processes.waits import LIMIT_S, until
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher
from trainer.weights.transfer import Rendezvous

ADDRESS = names(2)[f"{TRAINER}-0.{GROUP}"].address
PATIENCE_S = 120.0
"""How long publisher and nodes wait for each other; no test that publishes to healthy nodes waits
it out."""
_SETTINGS = {"RLHF_LIMITS__FENCE_AFTER_S": str(PATIENCE_S)}


class SyncedNodes(Cluster):
    """Two rollout nodes and the publishing side of a trainer."""

    patience_s = LIMIT_S

    def __init__(self, directory: Path, **settings: str) -> None:
        self.settings = _SETTINGS | settings
        super().__init__(directory, count=2, **self.settings)
        self.static_files = [
            file for file in self.model.iterdir() if file.name != "model.safetensors"
        ]
        self.fenced: list[str] = []
        self.server = ExitStack()
        """The trainer's HTTP server; closing it cuts the nodes off."""

    def serve(self) -> None:
        """Starts the trainer's HTTP server."""
        app = create_trainer_app(self.board, Metrics("trainer"))
        self.server.enter_context(BackgroundServer(app, ADDRESS, TRAINER_PORT))

    def start(self, rank: int) -> Node:
        return Node(rank, len(self.nodes), self.directory, self.model, **self.settings)

    def publisher(self, run_id: str, way: str) -> Publisher:
        """Returns the trainer's publisher, with buckets of a few tensors each."""

        def fence(worker: WorkerReport) -> None:
            self.fenced.append(worker.name)

        broadcaster, common = None, (self.board, self.static_files, run_id, PATIENCE_S)
        if way == "distributed":
            broadcaster = Broadcaster(*common, Rendezvous(ADDRESS), bucket_bytes=20_000)
        return Publisher(*common, fence, print, shared=way == "shared", broadcaster=broadcaster)

    def weights(self) -> dict[str, Tensor]:
        """Returns random weights."""
        return {name: torch.randn_like(tensor) / 10 for name, tensor in self.tensors.items()}

    def held(self) -> list[dict[str, str]]:
        """Returns the checksums of each engine's weights, by tensor."""
        answers = [
            httpx.post(f"{node.engine_url}/weights_checker", json={}, timeout=30, trust_env=False)
            for node in self.nodes
        ]
        return [answer.json()["ranks"][0]["checksums"] for answer in answers]

    def serving(self, run_id: str, version: int) -> bool:
        return [(w.state, w.run_id, w.version) for w in self.board.workers()] == [
            ("ready", run_id, version)
        ] * 2

    def announced(self) -> Broadcast:
        """Returns the announced broadcast of the newest version."""
        latest = self.board.latest()
        assert latest is not None
        assert latest.broadcast is not None
        return latest.broadcast

    def files(self) -> list[str]:
        """Returns the names of the versions that the trainer has written."""
        return sorted(path.name for path in self.board.directory.glob("v*"))

    def output(self) -> str:
        return "".join(node.output.read_text() for node in self.nodes)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until the condition holds; fails with what the nodes said."""

        def said() -> str:
            return f"{self.output()}\nnever: {what}; reports: {self.reports()}"

        until(condition, said, limit_s=self.patience_s)

    def healthy(self) -> bool:
        return all(node.healthy() for node in self.nodes)


def sums(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in weights.items()}
