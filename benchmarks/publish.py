"""The cost of publishing weights to 1, 2 and 4 receivers: `python -m benchmarks.publish [--gb 0.5]
[--rounds 3]`.

`full` versions change every weight. `delta` versions change a share `--changed` of them by one step
of bfloat16; in Gemma 3 270M, an Adam update at a learning rate of 1e-6 changes 2.5 %.

Each figure is the duration of `Publisher.publish`, which ends when every receiver has verified the
tensors and holds them in its own model. Receivers are processes with the client, the store and the
receiving code of the rollout nodes and the embedded engine. A plain copy of the same bytes stands
beside each figure. For http and shared it is a concurrent `cp` to as many files, alternating with
the versions; for distributed, one gloo broadcast to as many processes. CPU seconds cover all
processes; their ratio does not depend on other work on the machine.
"""

import asyncio
import multiprocessing
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.command import command_parser
from benchmarks.processes import calling, processes
from common.process.metrics import Metrics
from common.process.topology import Topology
from common.wire.schemas import WeightChecksums, WeightManifest, WorkerReport
from learning.weight_group import digest, join
from services.engine.distributed import DistributedBody, InitBody, WeightUpdates
from services.engine.requests import Body
from services.engine.weights import copy_tensors, load_into, own_tensors
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import TrainerClient, WeightId
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher
from trainer.weights.transfer import Rendezvous
from trainer.weights.versions import version_name

WAYS = ("http full", "http delta", "shared full", "shared delta", "distributed full")
HIDDEN = 1024
VOCABULARY = 16_384
FIRST = 5
"""Versions that are not counted; every later version overwrites a removed one."""
_TIMEOUT_S = 300.0


def model_like(size: int) -> dict[str, Tensor]:
    """Returns about `size` bytes of bfloat16 weights: an embedding and the layers of a Qwen2 of
    hidden size 1,024.
    """
    tensors = {"model.embed_tokens.weight": 0.02 * torch.randn(VOCABULARY, HIDDEN)}
    shapes = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (4 * HIDDEN, HIDDEN),
        "mlp.up_proj": (4 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 4 * HIDDEN),
    }
    layer = 0
    while sum(tensor.nbytes for tensor in tensors.values()) < size:
        tensors |= {
            f"model.layers.{layer}.{name}.weight": 0.02 * torch.randn(shape)
            for name, shape in shapes.items()
        }
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(HIDDEN)
        layer += 1
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return tensors


def move(weights: dict[str, Tensor], share: float) -> None:
    """Changes a share of the weights by one step of their precision, or all of them by more."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        if share == 1:
            flat.copy_(flat.roll(1))
            continue
        moved = torch.randint(len(flat), (int(share * len(flat)),))
        flat.view(torch.int16)[moved] += 1


class Held:
    """A receiver's model, with the parts of a module and an engine that the loading code uses."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.model = SimpleNamespace(module=self)

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._tensors.items())

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return []

    async def run(self, work: Callable[["Held"], Any], exclusive: bool = False) -> Any:
        return work(self)

    def update_weights(self, tensors: dict[str, Tensor], *_: object) -> None:
        copy_tensors(self, tensors)


async def receive(name: str, url: str, size: int, receivers: int, directory: Path) -> None:
    """Runs one receiver until it is killed."""
    held = Held(model_like(size))
    engine: Any = held
    updates = WeightUpdates(engine)
    group = ""
    serves: WeightId | None = None
    async with TrainerClient("trainer", url) as trainer:
        store = WeightStore(directory, trainer)
        while True:
            report = WorkerReport(
                name=name,
                url=name,
                num_nodes=receivers,
                state="ready",
                version=serves and serves.version,
            )
            await trainer.report(report.model_copy(update={"run_id": serves and serves.run_id}))
            manifest = await trainer.latest(serves, 5, 60)
            if manifest is None or WeightId.of(manifest) == serves:
                continue
            if manifest.broadcast is None:
                load_into(held, await store.fetch(manifest))
            else:
                group = await take_part(name, manifest, updates, group)
                sums = {tensor: digest(value) for tensor, value in own_tensors(held)}
                await trainer.verify(
                    manifest.version, WeightChecksums(worker=name, ranks=[sums]), _TIMEOUT_S
                )
            serves = WeightId.of(manifest)


def serve_receiver(name: str, url: str, size: int, receivers: int, directory: str) -> None:
    asyncio.run(receive(name, url, size, receivers, Path(directory)))


async def take_part(name: str, manifest: WeightManifest, updates: WeightUpdates, group: str) -> str:
    """Receives a broadcast, joining the group if it is new; returns the group's name."""
    plan = manifest.broadcast
    assert plan is not None
    if plan.group != group:
        place = {
            "master_address": plan.master_address,
            "master_port": plan.master_port,
            "backend": plan.backend,
            "group_name": plan.group,
            "rank_offset": plan.ranks[name],
            "world_size": plan.world_size,
        }
        await updates.init(InitBody.model_validate(place))
    await updates.begin(Body())
    for bucket in plan.buckets:
        body = bucket.model_dump() | {"group_name": plan.group, "load_format": "flattened_bucket"}
        await updates.receive(DistributedBody.model_validate(body))
    await updates.end(Body())
    return plan.group


@dataclass
class Took:
    """The costs of some work, one for each round."""

    seconds: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self, *processes: int) -> Iterator[None]:
        """Measures the enclosed work of this process, of its children that end meanwhile, and of
        `processes`.
        """
        begin = time.perf_counter()
        used = _processor_s(processes)
        yield
        self.seconds.append(time.perf_counter() - begin)
        self.processor_s.append(_processor_s(processes) - used)


def _processor_s(processes: Iterable[int]) -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    others = [
        Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
        for process in processes
    ]
    ticks = sum(int(each) for times in others for each in times)
    return sum(each.ru_utime + each.ru_stime for each in used) + ticks / os.sysconf("SC_CLK_TCK")


def published(
    way: str,
    receivers: int,
    weights: dict[str, Tensor],
    *,
    share: float,
    rounds: int,
    scratch: Path,
) -> tuple[Took, Took, int]:
    """Returns the cost of each publishing round and of the plain copies between, and the bytes of
    the last delta or 0.

    The first versions are not counted: they form groups and allocate memory and files.
    """
    size = sum(tensor.nbytes for tensor in weights.values())
    board = WeightBoard(scratch / "published")
    static = scratch / "config.json"
    static.write_text("{}")
    broadcaster = None
    if way == "distributed":
        rendezvous = Rendezvous("127.0.0.1")
        broadcaster = Broadcaster(board, [static], way, _TIMEOUT_S, rendezvous)

    def fence(worker: WorkerReport) -> None:
        raise RuntimeError(f"{worker.name} did not confirm: {worker.detail}")

    publisher = Publisher(
        board,
        [static],
        way,
        _TIMEOUT_S,
        fence,
        print,
        shared=way == "shared",
        broadcaster=broadcaster,
    )
    took = Took()
    plain = Took()
    receiver_ids: list[int] = []

    with ExitStack() as stack:
        server = stack.enter_context(
            BackgroundServer(create_trainer_app(board, Metrics("trainer")), "127.0.0.1", 0)
        )
        stack.callback(board.close)
        for index in range(receivers):
            name = f"receiver-{index}"
            url = f"http://127.0.0.1:{server.port}"
            command = calling(serve_receiver, name, url, size, receivers, str(scratch / name))
            (process,) = stack.enter_context(processes([command]))
            receiver_ids.append(process.pid)
        while len(board.workers()) < receivers:
            time.sleep(0.1)
        for version in range(FIRST + rounds):
            move(weights, share)
            with took.measured(*receiver_ids):
                publisher.publish(weights.items(), version)
            source = board.directory / version_name(version) / "model.safetensors"
            if source.exists():
                with plain.measured():
                    copy(source, receivers, scratch)
        latest = board.latest()
        sent = sum(file.delta.size for file in latest.files if file.delta) if latest else 0
    return took, plain, sent


def copy(source: Path, receivers: int, scratch: Path) -> None:
    """Copies a file with `cp`, in one concurrent process per receiver."""
    running = [
        subprocess.Popen(["cp", str(source), str(scratch / f"copy{index}")])
        for index in range(receivers)
    ]
    for process in running:
        process.wait()


def _gloo_group(port: int, rank: int, world_size: int) -> dist.ProcessGroup:
    return join(
        "127.0.0.1",
        port,
        rank=rank,
        world_size=world_size,
        name="raw",
        backend="gloo",
        timeout_s=_TIMEOUT_S,
    )


def _take(port: int, rank: int, world_size: int, size: int, rounds: int) -> None:
    group = _gloo_group(port, rank, world_size)
    flat = torch.empty(size, dtype=torch.uint8)
    for _ in range(FIRST + rounds):
        dist.broadcast(flat, src=0, group=group)
        dist.barrier(group=group)
    dist.destroy_process_group(group)


def broadcast(receivers: int, size: int, rounds: int) -> Took:
    """Measures one gloo broadcast of as many bytes, until every receiver has them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    world_size = receivers + 1
    arguments = [(store.port, rank, world_size, size, rounds) for rank in range(1, world_size)]
    running = [spawn.Process(target=_take, args=each) for each in arguments]
    for process in running:
        process.start()
    group = _gloo_group(store.port, 0, world_size)
    flat = torch.ones(size, dtype=torch.uint8)
    took = Took()
    ids = [process.pid or 0 for process in running]
    for _ in range(FIRST + rounds):
        with took.measured(*ids):
            dist.broadcast(flat, src=0, group=group)
            dist.barrier(group=group)
    for process in running:
        process.join()
    dist.destroy_process_group(group)
    return took


def main() -> None:
    parser = command_parser("benchmarks.publish", __doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="gigabytes of weights")
    parser.add_argument(
        "--changed", type=float, default=0.025, help="share of the weights that a delta changes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    os.environ.update(Topology().loopback_env())
    weights = model_like(int(arguments.gb * 1e9))
    size = sum(tensor.nbytes for tensor in weights.values())
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(f"{size / 1e9:.2f} GB in {len(weights)} tensors, {machine}; medians")
    print(
        f"{'receivers':>9} {'way':>16} {'s':>6} {'copy s':>6} {'ratio':>6} "
        f"{'CPU s':>6} {'copy':>6} {'ratio':>6} {'MB sent':>8}"
    )
    for receivers in arguments.receivers:
        for way in arguments.ways:
            kind = way.split()[0]
            with tempfile.TemporaryDirectory() as folder:
                took, plain, sent = published(
                    kind,
                    receivers,
                    weights,
                    share=arguments.changed if "delta" in way else 1.0,
                    rounds=arguments.rounds,
                    scratch=Path(folder),
                )
            if kind == "distributed":
                plain = broadcast(receivers, size, arguments.rounds)
            cells = []
            for figures in ("seconds", "processor_s"):
                publish_s = statistics.median(getattr(took, figures)[FIRST:])
                copy_s = statistics.median(getattr(plain, figures)[FIRST:])
                cells.append(f"{publish_s:>6.2f} {copy_s:>6.2f} {publish_s / copy_s:>6.1f}")
            print(
                f"{receivers:>9} {way:>16} {cells[0]} {cells[1]} {(sent or size) / 1e6:>8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
