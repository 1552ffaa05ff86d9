"""Rollout nodes as real processes, each on its own loopback address."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save_file

from common.clients.rollout import RolloutClient
from common.process.topology import REWARD, ROLLOUT, TRAINER, LocalHost, format_hosts
from common.weights.checksums import checksum
from common.wire.schemas import WeightFile, WeightManifest, WorkerReport
from tests.support.paths import ROOT
from tests.support.processes.waits import comes
from trainer.cli.tiny_base import make_model, make_tokenizer
from trainer.weights.board import WeightBoard

GROUP = "test"
TRAINER_PORT = 8004


def names(count: int) -> dict[str, LocalHost]:
    """Returns loopback addresses that no other run on this machine uses."""
    block = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 256}"
    hosts = {f"{ROLLOUT}-{i}.{GROUP}": LocalHost(f"{block}.{10 + i}") for i in range(count)}
    return hosts | {
        f"{TRAINER}-0.{GROUP}": LocalHost(f"{block}.20"),
        f"{REWARD}-0.{GROUP}": LocalHost(f"{block}.30"),
    }


def environment(rank: int, count: int, state_dir: Path, model: Path) -> dict[str, str]:
    hosts = names(count)
    ips = "\n".join(hosts[f"{ROLLOUT}-{i}.{GROUP}"].address for i in range(count))
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RLHF_", "SKYPILOT_", "RUN_CONFIG"))
    }
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


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


class Node:
    """A `python -m services.rollout` process, with access to its agent's HTTP API.

    `within` are the first words of its command.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        state_dir: Path,
        model: Path,
        within: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.rank = rank
        self.url = f"http://{names(count)[f'{ROLLOUT}-{rank}.{GROUP}'].address}:30002"
        self.engine_url = self.url.replace(":30002", ":30001")
        self.router_url = self.url.replace(":30002", ":30000")
        self.output = state_dir / f"output-{rank}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "services.rollout"],
                env=environment(rank, count, state_dir, model) | settings,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False)

    def status(self) -> dict[str, Any]:
        answer = self.get("/status").json()
        assert isinstance(answer, dict)
        return answer

    def healthy(self) -> bool:
        assert self.process.poll() is None, (
            f"node {self.rank} ended: {self.output.read_text()[-3000:]}"
        )
        with contextlib.suppress(httpx.TransportError):
            return self.get("/health").is_success
        return False

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """The engine's own process, a child of the guard that the agent starts; the guard is there
        a moment earlier."""
        guard = psutil.Process(self.status()["engine_pid"])
        while not (children := guard.children()):
            assert guard.status() != psutil.STATUS_ZOMBIE, "the engine's guard ended"
            time.sleep(0.01)
        return children[0]

    def end(self) -> None:
        """Ends every process that the test left."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(400)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cluster:
    """`count` nodes, the trainer's weight server, and versions to publish."""

    def __init__(self, directory: Path, count: int = 2, **settings: str) -> None:
        self.directory = directory
        self.model = directory / "model"
        self.write_model()
        self.tensors = load_file(self.model / "model.safetensors")
        self.board = WeightBoard(directory / "published")
        self.nodes = [Node(rank, count, directory, self.model, **settings) for rank in range(count)]

    def write_model(self) -> None:
        """Writes the model that the engines start with."""
        torch.manual_seed(0)
        tokenizer = make_tokenizer(iter(["1 + 2 = 3", "4 + 5 = 9"]))
        make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(
            self.model
        )
        tokenizer.save_pretrained(self.model)

    def publish(self, run_id: str, version: int, spoil: bool = False) -> WeightManifest:
        """Publishes random weights of the same shapes; with `spoil`, one byte differs from the
        manifest."""
        target = self.board.directory / f"v{version:06d}"
        shutil.rmtree(self.board.directory, ignore_errors=True)
        shutil.copytree(self.model, target)
        weights = {
            name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in self.tensors.items()
        }
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        files = [
            WeightFile(name=file.name, size=file.stat().st_size, xxh3=checksum(file))
            for file in sorted(target.iterdir())
        ]
        if spoil:
            self.flip_byte(version)
        manifest = WeightManifest(version=version, run_id=run_id, files=files)
        self.board.announce(manifest)
        return manifest

    def flip_byte(self, version: int) -> None:
        """Damages the weights, or repairs damaged ones."""
        flip_last_byte(self.board.directory / f"v{version:06d}" / "model.safetensors")

    def reports(self) -> list[WorkerReport]:
        return sorted(self.board.workers(), key=lambda report: report.name)

    def all_serve(self, run_id: str, version: int) -> bool:
        """Returns whether all nodes report this version to the trainer and are in the router."""
        said = [(report.state, report.run_id, report.version) for report in self.reports()]
        urls = {node.engine_url for node in self.nodes}
        return said == [("ready", run_id, version)] * len(urls) and self.routed() == urls

    def routed(self) -> set[str]:
        """Returns the engines to which the router sends requests."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(
                self.nodes[0].router_url + "/workers", timeout=5, trust_env=False
            ).json()
            return {worker["url"] for worker in answer["workers"] if worker["is_healthy"]}
        return set()


async def until(condition: Callable[[], bool], what: str, cluster: Cluster) -> None:
    def said() -> str:
        output = "".join(node.output.read_text()[-3000:] for node in cluster.nodes)
        return f"{output}\nnever: {what}; reports: {cluster.reports()}"

    await comes(condition, said)


async def generate(rollout: RolloutClient) -> int:
    """Requests a short completion through the router and returns its weight version."""
    completions = await rollout.generate(
        [5, 6, 7], n=2, max_new_tokens=4, temperature=1.0, stop_token_ids=[]
    )
    return completions[0].weight_version


def requests_served(node: Node) -> int:
    text = httpx.get(node.engine_url + "/metrics", timeout=10, trust_env=False).text
    lines = [
        line
        for line in text.splitlines()
        if "http_requests_total{" in line and 'route="/generate"' in line
    ]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
