"""Seconds to publish weights to 1, 2 and 4 receivers by each way: `python -m benchmarks.publish [--gb 0.5] [--rounds 3]`.

A figure is the time of `Publisher.publish`: from the tensors of the trainer until every receiver has them, verified, in the
tensors of its own model. Receivers are processes with the client, the store and the receiving code of the rollout nodes and the
embedded engine. Beside each, in the same run: the same bytes plainly copied, by `cp` to as many files at once for
http and shared, by one gloo broadcast to as many processes for distributed.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.observe import Metrics
from common.schemas import WeightChecksums, WeightManifest, WorkerReport
from common.topology import Topology
from learning.weight_group import digest, join
from services.engine.distributed import DistributedBody, InitBody, WeightUpdates
from services.engine.weights import copy_tensors, load_into, own_tensors
from services.rollout.weights.store import TrainerClient, WeightId, WeightStore, shared_directory
from trainer.server import BackgroundServer, create_trainer_app
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher, WeightBoard
from trainer.weights.transfer import Rendezvous

WAYS = ("http", "shared", "distributed")
HIDDEN, VOCABULARY = 1024, 16_384
_TIMEOUT_S = 300.0


def model_like(size: int) -> dict[str, Tensor]:
    """About `size` bytes of float32: an embedding, and layers as a Qwen2 of hidden size 1,024 has them."""
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN)}
    shapes = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (4 * HIDDEN, HIDDEN),
        "mlp.up_proj": (4 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 4 * HIDDEN),
    }
    layer = 0
    while sum(tensor.nbytes for tensor in tensors.values()) < size:
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(HIDDEN)
        layer += 1
    return tensors


class Held:
    """The model of a receiver: what the loading code asks of a module, and of an engine."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.model = SimpleNamespace(module=self)

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._tensors.items())

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return []

    def load_tensors(self, tensors: dict[str, Tensor], *_: object) -> "Future[None]":
        copy_tensors(self, tensors)
        done: Future[None] = Future()
        done.set_result(None)
        return done


async def receive(name: str, url: str, size: int, receivers: int, directory: Path) -> None:
    """One receiver, until it is killed."""
    held = Held(model_like(size))
    engine: Any = held
    updates, store, group = WeightUpdates(engine), WeightStore(directory), ""
    serves: WeightId | None = None
    async with TrainerClient("trainer", url) as trainer:
        while True:
            report = WorkerReport(name=name, url=name, num_nodes=receivers, state="ready", version=serves and serves.version)
            await trainer.report(report.model_copy(update={"run_id": serves and serves.run_id}))
            manifest = await trainer.latest(serves, 5, 60)
            if manifest is None or WeightId.of(manifest) == serves:
                continue
            if manifest.broadcast is None:
                load_into(held, await shared_directory(manifest) or await store.fetch(manifest, trainer))
            else:
                group = await take_part(name, manifest, updates, group)
                sums = {tensor: digest(value) for tensor, value in own_tensors(held).items()}
                await trainer.verify(manifest.version, WeightChecksums(worker=name, ranks=[sums]), _TIMEOUT_S)
            serves = WeightId.of(manifest)


async def take_part(name: str, manifest: WeightManifest, updates: WeightUpdates, group: str) -> str:
    """Receives a broadcast; the name of the group, which is joined when it is a new one."""
    plan = manifest.broadcast
    assert plan is not None
    if plan.group != group:
        place = {"master_address": plan.master_address, "master_port": plan.master_port, "backend": plan.backend}
        place |= {"group_name": plan.group, "rank_offset": plan.ranks[name], "world_size": plan.world_size}
        await updates.init(InitBody.model_validate(place))
    await updates.begin()
    for bucket in plan.buckets:
        body = bucket.model_dump() | {"group_name": plan.group, "load_format": "flattened_bucket"}
        await updates.receive(DistributedBody.model_validate(body))
    await updates.end()
    return plan.group


def published(way: str, receivers: int, weights: dict[str, Tensor], size: int, rounds: int, scratch: Path) -> list[float]:
    """Seconds of each round; the first version, with which groups are formed and memory is allocated, does not count."""
    board = WeightBoard(scratch / "published")
    static = scratch / "config.json"
    static.write_text("{}")
    common = (board, [static], way, _TIMEOUT_S)
    broadcaster = Broadcaster(*common, Rendezvous("127.0.0.1")) if way == "distributed" else None

    def fence(worker: WorkerReport) -> None:
        raise RuntimeError(f"{worker.name} did not confirm: {worker.detail}")

    publisher = Publisher(*common, fence, print, shared=way == "shared", broadcaster=broadcaster)
    seconds = []

    with ExitStack() as stack:
        server = stack.enter_context(BackgroundServer(create_trainer_app(board, Metrics("trainer")), "127.0.0.1", 0))
        stack.callback(board.close)
        for index in range(receivers):
            words = [
                f"receiver-{index}",
                f"http://127.0.0.1:{server.port}",
                str(size),
                str(receivers),
                str(scratch / f"r{index}"),
            ]
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.publish", "--receive", *words])
            stack.callback(process.wait)
            stack.callback(process.kill)
        while len(board.workers()) < receivers:
            time.sleep(0.1)
        for version in range(1 + rounds):
            begin = time.perf_counter()
            publisher.publish(weights.items(), version)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def copied(receivers: int, size: int, rounds: int, scratch: Path) -> list[float]:
    """Seconds of `cp`, one process for each receiver at once."""
    source = scratch / "source"
    with source.open("wb") as stream:
        for _ in range(size // (1 << 20)):
            stream.write(os.urandom(1 << 20))
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        running = [subprocess.Popen(["cp", str(source), str(scratch / f"copy{index}")]) for index in range(receivers)]
        for process in running:
            process.wait()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _take(port: int, rank: int, world_size: int, size: int, rounds: int) -> None:
    group = join("127.0.0.1", port, rank, world_size, "raw", "gloo", _TIMEOUT_S)
    flat = torch.empty(size, dtype=torch.uint8)
    for _ in range(1 + rounds):
        dist.broadcast(flat, src=0, group=group)
        dist.barrier(group=group)
    dist.destroy_process_group(group)


def broadcast(receivers: int, size: int, rounds: int) -> list[float]:
    """Seconds of one gloo broadcast of as many bytes, until every receiver has them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn, world_size = multiprocessing.get_context("spawn"), receivers + 1
    arguments = [(store.port, rank, world_size, size, rounds) for rank in range(1, world_size)]
    running = [spawn.Process(target=_take, args=each) for each in arguments]
    for process in running:
        process.start()
    group = join("127.0.0.1", store.port, 0, world_size, "raw", "gloo", _TIMEOUT_S)
    flat, seconds = torch.ones(size, dtype=torch.uint8), []
    for _ in range(1 + rounds):
        begin = time.perf_counter()
        dist.broadcast(flat, src=0, group=group)
        dist.barrier(group=group)
        seconds.append(time.perf_counter() - begin)
    for process in running:
        process.join()
    dist.destroy_process_group(group)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="gigabytes of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--receive", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(Topology().loopback_env())
    if arguments.receive:
        name, url, size, count, directory = arguments.receive
        asyncio.run(receive(name, url, int(size), int(count), Path(directory)))
        return
    weights = model_like(int(arguments.gb * 1e9))
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{size / 1e9:.2f} GB in {len(weights)} tensors, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; medians")
    print(f"{'receivers':>9} {'way':>12} {'s':>7} {'MB/s':>6} {'plain copy s':>13} {'ratio':>6}", flush=True)
    for receivers in arguments.receivers:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                took = statistics.median(published(way, receivers, weights, size, arguments.rounds, Path(folder)))
            with tempfile.TemporaryDirectory() as folder:
                rounds = arguments.rounds
                plain = (
                    broadcast(receivers, size, rounds)
                    if way == "distributed"
                    else copied(receivers, size, rounds, Path(folder))
                )
            copy = statistics.median(plain)
            print(
                f"{receivers:>9} {way:>12} {took:>7.2f} {size / took / 1e6:>6.0f} {copy:>13.2f} {took / copy:>6.1f}", flush=True
            )


if __name__ == "__main__":
    main()
