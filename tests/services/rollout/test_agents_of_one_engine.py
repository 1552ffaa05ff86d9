"""The agents of an engine over two nodes with a stand-in for SGLang whose processes never notice that
a peer is gone. `test_engine_over_nodes.py` has SGLang itself.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from common.clients.rollout import BASE_VERSION
from common.process.metrics import Metrics
from tests.support.engines.rollout_nodes import TRAINER_PORT, Node
from tests.support.engines.synced_nodes import ADDRESS, SyncedNodes
from tests.support.paths import ROOT
from trainer.backends.server import BackgroundServer, create_trainer_app

pytestmark = pytest.mark.integration
needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"]).returncode != 0,
    reason="mount namespaces are not permitted here",
)
_SETTINGS = {
    "RLHF_ROLLOUT__ENGINE": "sglang",
    "RLHF_ROLLOUT__ENGINE_PYTHON": sys.executable,
    "RLHF_ROLLOUT__TENSOR_PARALLEL_SIZE": "2",
    "RLHF_ROLLOUT__NODES_PER_ENGINE": "2",
    "PYTHONPATH": str(ROOT / "tests" / "support" / "engines" / "parallel_sglang"),
}
START = "starting engine: "


class Engine(SyncedNodes):
    """Two nodes that form one engine."""

    def serves(self, version: int | None) -> bool:
        reports = [(each.name, each.state, each.version) for each in self.reports()]
        is_served = reports == [("rollout-server-0", "ready", version)]
        return is_served and self.routed() == {self.nodes[0].engine_url} and self.healthy()

    def held(self) -> list[dict[str, str]]:
        url = f"{self.nodes[0].engine_url}/weights_checker"
        answer = httpx.post(url, json={}, timeout=30, trust_env=False).json()
        return [rank["checksums"] for rank in answer["ranks"]]

    def said(self, rank: int) -> str:
        return self.nodes[rank].output.read_text()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("nodes"), **_SETTINGS)
    app = create_trainer_app(engine.board, Metrics("trainer"))
    with BackgroundServer(app, ADDRESS, TRAINER_PORT):
        try:
            engine.until(lambda: engine.serves(None), f"{BASE_VERSION} weights")
            yield engine
        finally:
            for node in engine.nodes:
                node.end()
            engine.board.close()


def sums(file: Path) -> dict[str, str]:
    return {"model": hashlib.md5(file.read_bytes()).hexdigest()}  # noqa: S324


def test_every_process_reads_a_version_before_the_router_and_the_trainer_hear_of_it(
    engine: Engine,
) -> None:
    for version in (1, 2):
        engine.publish("a", version)
        engine.until(partial(engine.serves, version), f"weights {version}")
        published = engine.board.directory / f"v{version:06d}" / "model.safetensors"
        assert engine.held() == [sums(published)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_ends_ends_the_engine_which_starts_again_with_its_weights(
    engine: Engine, rank: int
) -> None:
    engine.publish(f"killed-{rank}", 3)
    engine.until(lambda: engine.serves(3), "weights 3")
    starts = [engine.said(node).count(START) for node in (0, 1)]
    engine.nodes[rank].engine().kill()
    engine.until(
        lambda: [engine.said(node).count(START) for node in (0, 1)] == [n + 1 for n in starts],
        "another process on both nodes",
    )
    engine.until(lambda: engine.serves(3), "weights 3 again")
    assert engine.held() == [sums(engine.board.directory / "v000003" / "model.safetensors")] * 2
    if rank == 1:
        assert "rollout-server-1: the process " in engine.said(0)
    else:
        assert "rollout-server-0 ends or restarts the engine" in engine.said(1)


@needs_namespaces
def test_nodes_with_disks_of_their_own_read_the_weights_at_the_same_path(engine: Engine) -> None:
    """The second node sees an empty disk where the first keeps its weights."""
    hide = f'mount -t tmpfs none {engine.directory / "rollout"} && exec "$0" "$@"'
    engine.nodes[1].end()
    engine.nodes[1] = Node(
        1,
        2,
        engine.directory,
        model=engine.model,
        within=("unshare", "-rm", "sh", "-c", hide),
        **engine.settings,
    )
    for version in (4, 5, 6, 7):
        engine.publish("own-disk", version)
        engine.until(partial(engine.serves, version), f"weights {version}")
        published = engine.board.directory / f"v{version:06d}" / "model.safetensors"
        assert engine.held() == [sums(published)] * 2

    path = engine.directory.absolute() / "rollout" / "rollout-server-0" / "weights"
    assert not (path / "v000007").is_symlink()
    seen = Path(f"/proc/{engine.nodes[1].process.pid}/root{path}")
    links = {link.name: str(link.readlink()) for link in seen.iterdir()}
    own = path.parents[1] / "rollout-server-1" / "weights"
    assert links == {name: str(own / name) for name in ("v000006", "v000007")}


@pytest.mark.slow
def test_an_agent_that_is_started_again_does_not_join_an_engine_that_runs(engine: Engine) -> None:
    engine.publish("again", 8)
    engine.until(partial(engine.serves, 8), "weights 8")
    before = engine.said(0).count("its agent was started again")
    started = engine.said(0).count(START)
    os.killpg(engine.nodes[1].process.pid, signal.SIGKILL)
    engine.nodes[1].process.wait()
    engine.nodes[1] = engine.start(1)  # at once, before it counts as lost
    engine.until(lambda: engine.said(0).count(START) > started, "another start")
    engine.until(partial(engine.serves, 8), "weights 8 again")
    assert engine.said(0).count("its agent was started again") > before


def test_no_process_is_left_when_the_agents_have_ended(engine: Engine) -> None:
    processes = [psutil.Process(node.process.pid) for node in engine.nodes]
    children = [child for process in processes for child in process.children(recursive=True)]
    assert len(children) >= 4
    for node in engine.nodes:
        node.process.terminate()
    for node in engine.nodes:
        assert node.process.wait(400) == 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
