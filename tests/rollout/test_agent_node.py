"""Two rollout nodes as real processes: real engines, real agents, the real router, the trainer's own weight server."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.observe import Metrics
from common.rollout_client import RolloutClient
from common.schemas import WeightFile, WeightManifest, WorkerReport
from common.topology import REWARD, ROLLOUT, TRAINER, LocalHost, format_hosts
from trainer.cli.tiny_model import make_model, make_tokenizer
from trainer.server import BackgroundServer, create_trainer_app
from trainer.weights.publisher import WeightBoard

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="every node gets a loopback address of its own"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).resolve().parents[2]
GROUP = "test"
TRAINER_PORT = 8004


def names(count: int) -> dict[str, LocalHost]:
    """Loopback addresses that no other run on this machine has."""
    block = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 256}"
    hosts = {f"{ROLLOUT}-{i}.{GROUP}": LocalHost(f"{block}.{10 + i}") for i in range(count)}
    return hosts | {f"{TRAINER}-0.{GROUP}": LocalHost(f"{block}.20"), f"{REWARD}-0.{GROUP}": LocalHost(f"{block}.30")}


def environment(rank: int, count: int, state_dir: Path, model: Path) -> dict[str, str]:
    hosts = names(count)
    ips = "\n".join(hosts[f"{ROLLOUT}-{i}.{GROUP}"].address for i in range(count))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "SKYPILOT_", "RUN_CONFIG"))}
    return clean | {
        "SKYPILOT_JOBGROUP_NAME": GROUP,
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(count),
        "SKYPILOT_NODE_IPS": ips,
        "JOBGROUP_HOSTS": format_hosts(hosts),
        "STATE_DIR": str(state_dir),
        "MODEL_NAME": str(model),
        "OMP_NUM_THREADS": "1",
        "RLHF_ROLLOUT__ENGINE": "embedded",
        "RLHF_ROLLOUT__MAX_CONTEXT_TOKENS": "128",
        "RLHF_SAMPLING__MAX_NEW_TOKENS": "32",
    }


class Node:
    """`python -m services.rollout` with its agent's HTTP."""

    def __init__(self, rank: int, count: int, state_dir: Path, model: Path, **settings: str) -> None:
        self.rank = rank
        self.url = f"http://{names(count)[f'{ROLLOUT}-{rank}.{GROUP}'].address}:30002"
        self.engine_url = self.url.replace(":30002", ":30001")
        self.router_url = self.url.replace(":30002", ":30000")
        self.output = state_dir / f"output-{rank}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.rollout"],
                env=environment(rank, count, state_dir, model) | settings,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10, trust_env=False)

    def status(self) -> dict[str, Any]:
        answer = self.get("/status").json()
        assert isinstance(answer, dict)
        return answer

    def healthy(self) -> bool:
        assert self.process.poll() is None, f"node {self.rank} ended: {self.output.read_text()[-3000:]}"
        with contextlib.suppress(httpx.TransportError):
            return self.get("/health").is_success
        return False

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        return psutil.Process(self.status()["engine_pid"]).children()[0]

    def end(self) -> None:
        """Whatever the test left."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cluster:
    """Two nodes, the trainer's weight server, and versions to publish."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory = directory
        self.model = directory / "model"
        torch.manual_seed(0)
        tokenizer = make_tokenizer(iter(["1 + 2 = 3", "4 + 5 = 9"]))
        make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(self.model)
        tokenizer.save_pretrained(self.model)
        self.tensors = load_file(self.model / "model.safetensors")
        self.board = WeightBoard(directory / "published")
        self.nodes = [Node(rank, 2, directory, self.model, **settings) for rank in (0, 1)]

    def publish(self, run_id: str, version: int, spoil: bool = False) -> WeightManifest:
        """Random weights of the same shapes; with `spoil` one byte differs from what the manifest says."""
        target = self.board.directory / f"v{version:06d}"
        shutil.rmtree(self.board.directory, ignore_errors=True)
        shutil.copytree(self.model, target)
        weights = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in self.tensors.items()}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        files = [
            WeightFile(name=file.name, size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
            for file in sorted(target.iterdir())
        ]
        if spoil:
            self.flip_byte(version)
        manifest = WeightManifest(version=version, run_id=run_id, files=files)
        self.board.announce(manifest)
        return manifest

    def flip_byte(self, version: int) -> None:
        """Spoils the weights, or repairs them."""
        with (self.board.directory / f"v{version:06d}" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))

    def reports(self) -> list[WorkerReport]:
        return sorted(self.board.workers(), key=lambda report: report.name)

    def all_serve(self, run_id: str, version: int) -> bool:
        """Both nodes said so to the trainer and are in the router."""
        said = [(report.state, report.run_id, report.version) for report in self.reports()]
        return said == [("ready", run_id, version)] * 2 and self.routed() == {node.engine_url for node in self.nodes}

    def routed(self) -> set[str]:
        """Engines that the router sends traffic to."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(self.nodes[0].router_url + "/workers", timeout=5, trust_env=False).json()
            return {worker["url"] for worker in answer["workers"] if worker["is_healthy"]}
        return set()


async def until(condition: Callable[[], bool], what: str, cluster: Cluster) -> None:
    limit = time.monotonic() + 180
    while not condition():
        output = "".join(node.output.read_text()[-3000:] for node in cluster.nodes)
        assert time.monotonic() < limit, f"never: {what}; reports: {cluster.reports()}\n{output}"
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    app = create_trainer_app(cluster.board, Metrics("trainer"))
    address = names(2)[f"{TRAINER}-0.{GROUP}"].address
    with BackgroundServer(app, address, TRAINER_PORT):
        try:
            yield cluster
        finally:
            for node in cluster.nodes:
                node.end()
            cluster.board.close()


@pytest.fixture
async def both(cluster: Cluster) -> Cluster:
    """Both nodes healthy, on whatever weights the test before left them."""
    await until(lambda: all(node.healthy() for node in cluster.nodes), "both nodes healthy", cluster)
    return cluster


@pytest.fixture
async def rollout(cluster: Cluster) -> AsyncIterator[RolloutClient]:
    async with RolloutClient("router", cluster.nodes[0].router_url, deadline_s=60) as client:
        yield client


async def generate(rollout: RolloutClient) -> int:
    """The weight version of a short completion, asked for through the router."""
    completions = await rollout.generate([5, 6, 7], n=2, max_new_tokens=4, temperature=1.0, stop_token_ids=[])
    return completions[0].weight_version


async def served(node: Node) -> int:
    """The weight version this node's engine answers with, asked directly."""
    async with RolloutClient("engine", node.engine_url, deadline_s=60) as engine:
        return await generate(engine)


async def test_base_model_is_served_before_anything_is_published(cluster: Cluster, rollout: RolloutClient) -> None:
    await until(lambda: all(node.healthy() for node in cluster.nodes), "both nodes healthy", cluster)
    assert {report.version for report in cluster.reports()} <= {None}
    assert cluster.routed() == {node.engine_url for node in cluster.nodes}
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    answer = await rollout.request("POST", "/generate", json=body)
    assert answer.json()["meta_info"]["weight_version"] == "default"


async def test_published_version_is_served_by_every_engine_through_the_router(both: Cluster, rollout: RolloutClient) -> None:
    both.publish("a", 1)
    both.publish("a", 12)
    await until(lambda: both.all_serve("a", 12), "weights 12 everywhere", both)
    assert {await generate(rollout) for _ in range(8)} == {12}
    assert [await served(node) for node in both.nodes] == [12, 12]
    for node in both.nodes:
        assert "rlhf_rollout_weight_version 12.0" in node.get("/metrics").text
        assert sum(process.name().startswith("sglang") for process in node.family()) == (node.rank == 0)


async def test_both_nodes_get_traffic(both: Cluster, rollout: RolloutClient) -> None:
    both.publish("a", 13)
    await until(lambda: both.all_serve("a", 13), "weights 13 everywhere", both)
    before = [requests_served(node) for node in both.nodes]
    for _ in range(10):
        await generate(rollout)
    after = [requests_served(node) for node in both.nodes]
    assert [new - old for old, new in zip(before, after, strict=True)] == [5, 5]


def requests_served(node: Node) -> int:
    text = httpx.get(node.engine_url + "/metrics", timeout=10, trust_env=False).text
    lines = [line for line in text.splitlines() if "http_requests_total{" in line and 'route="/generate"' in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


async def test_corrupted_weights_fence_the_nodes_until_they_are_repaired(both: Cluster, rollout: RolloutClient) -> None:
    both.publish("a", 20, spoil=True)
    await until(lambda: [report.state for report in both.reports()] == ["stale"] * 2, "both stale", both)
    await until(lambda: both.routed() == set(), "both fenced", both)
    assert all("checksum" in report.detail for report in both.reports())
    answer = both.nodes[1].get("/health")
    assert answer.status_code == 503
    assert "checksum" in answer.json()["reason"]
    both.flip_byte(20)
    await until(lambda: both.all_serve("a", 20), "weights 20 everywhere", both)
    assert await generate(rollout) == 20


async def test_killed_engine_comes_back_with_the_newest_weights(both: Cluster, rollout: RolloutClient) -> None:
    both.publish("a", 21)
    await until(lambda: both.all_serve("a", 21), "weights 21 everywhere", both)
    node, starts = both.nodes[1], both.nodes[1].status()["engine_starts"]
    node.engine().kill()
    await until(lambda: node.status()["engine_starts"] == starts + 1, "engine started again", both)
    assert {await generate(rollout) for _ in range(4)} == {21}  # by the other node meanwhile
    await until(lambda: both.all_serve("a", 21), "weights 21 everywhere again", both)
    command = node.engine().cmdline()
    assert command[command.index("--weight-version") + 1] == "21"
    assert command[command.index("--model-path") + 1].endswith("rollout-server-1/weights/v000021")
    assert await served(node) == 21


async def test_an_engine_that_starts_slowly_finds_the_weights_it_was_started_with(both: Cluster) -> None:
    both.publish("a", 21)
    await until(lambda: both.all_serve("a", 21), "weights 21 everywhere", both)
    node, starts = both.nodes[1], both.nodes[1].status()["engine_starts"]
    node.engine().kill()
    await until(lambda: node.status()["engine_starts"] == starts + 1, "engine started again", both)
    starting = node.engine()
    starting.suspend()  # long before it reads anything
    store = both.directory / "rollout" / "rollout-server-1" / "weights"
    for version in (22, 23, 24, 25):
        both.publish("a", version)
        await until(lambda path=store / f"v{version:06d}": path.is_dir(), f"weights {version} here", both)  # type: ignore[misc]
    starting.resume()
    await until(lambda: both.all_serve("a", 25), "weights 25 everywhere", both)
    assert node.status()["engine_starts"] == starts + 1
    assert "v000021" in " ".join(node.engine().cmdline())
    both.publish("a", 26)
    await until(lambda: both.all_serve("a", 26), "weights 26 everywhere", both)
    assert sorted(path.name for path in store.iterdir()) == ["v000025", "v000026"]


async def test_killed_router_comes_back_with_its_workers(both: Cluster, rollout: RolloutClient) -> None:
    both.publish("a", 27)
    await until(lambda: both.all_serve("a", 27), "weights 27 everywhere", both)
    old = both.nodes[0].status()["router_pid"]
    psutil.Process(old).children()[0].kill()
    await until(lambda: both.nodes[0].status()["router_pid"] not in (None, old), "another router", both)
    await until(lambda: both.all_serve("a", 27), "both registered again", both)
    assert await generate(rollout) == 27


async def test_new_run_replaces_the_weights_though_its_version_is_lower(both: Cluster, rollout: RolloutClient) -> None:
    both.publish("a", 30)
    await until(lambda: both.all_serve("a", 30), "weights 30 everywhere", both)
    both.publish("b", 0)
    await until(lambda: both.all_serve("b", 0), "weights 0 of the new run", both)
    assert {await generate(rollout) for _ in range(4)} == {0}


async def test_weights_the_engine_refuses_fence_the_node_until_good_ones_come(both: Cluster, rollout: RolloutClient) -> None:
    good = both.tensors
    both.tensors = {name: tensor[:1] for name, tensor in good.items()}
    both.publish("b", 1)
    both.tensors = good
    await until(lambda: [report.state for report in both.reports()] == ["stale"] * 2, "both stale", both)
    assert all("load of weights 1 failed" in report.detail for report in both.reports())
    await until(lambda: both.routed() == set(), "both fenced", both)
    both.publish("b", 2)
    await until(lambda: both.all_serve("b", 2), "weights 2 everywhere", both)
    assert await generate(rollout) == 2


async def test_ending_leaves_no_process_behind(both: Cluster) -> None:
    """Last: it ends the nodes, one by SIGKILL and one by SIGTERM."""
    killed, ended = both.nodes[1], both.nodes[0]
    families = [*killed.family(), *ended.family()]
    assert len(families) == 6
    killed.process.kill()
    killed.process.wait(30)
    ended.process.send_signal(signal.SIGTERM)
    assert ended.process.wait(60) == 0
    _, alive = psutil.wait_procs(families, timeout=30)
    assert alive == []
    assert "Traceback" not in ended.output.read_text()
