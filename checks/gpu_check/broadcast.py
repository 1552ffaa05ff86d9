"""Weights broadcast from one process to another as from the trainer to an engine: NCCL where there
are two GPUs.
"""

import hashlib
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from common.process.topology import Topology
from common.wire.schemas import Broadcast, WorkerReport
from learning.weight_group import join, size_of, views
from trainer.weights.host_copy import HostCopy
from trainer.weights.transfer import BackendName, EngineGroup, Rendezvous

_TIMEOUT_S = 60
_ROUNDS = 4
"""Versions that are sent; the first connects, and is not counted."""


def measure(found: Findings, setting: Setting) -> None:
    """Sends buckets of weights to a second process and compares every byte that arrived."""
    text = "a broadcast of weights between two processes by NCCL"
    if setting.on_gpu and torch.cuda.device_count() < 2:
        found.not_reached(text, "NCCL needs a GPU for each process, and here is one")
        return
    backend: BackendName = "nccl" if setting.on_gpu else "gloo"
    os.environ.update(Topology().loopback_env())
    weights = _weights(setting)
    copy = HostCopy(bucket_bytes=(1 << 20) if setting.small else (512 << 20))
    copy.fill(weights.items(), 0)

    worker = WorkerReport(name="engine", url="", num_nodes=1, state="ready", version=None)
    group = EngineGroup([worker], Rendezvous("127.0.0.1", backend), _TIMEOUT_S)
    plan = group.announcement(copy.buckets)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_receive, args=(plan.model_dump(), there), daemon=True)
    process.start()
    there.close()  # so that the other process's end is noticed

    times = []
    try:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            for flat in copy.flats:
                group.send(flat)
            arrived: list[str] = _answer(here)
            times.append(time.perf_counter() - start)
            here.send("next")
        sums = _answer(here)
    finally:
        group.close()
        process.join(_TIMEOUT_S)
    wanted = {name: _sum(tensor) for name, tensor in weights.items()}
    different = [name for name in wanted if sums.get(name) != wanted[name]]
    found.claim(
        f"{len(wanted)} tensors received by {backend}, byte by byte",
        "0 differ",
        f"{len(different)} differ",
        not different,
    )
    took = statistics.median(times[1:])
    text = (
        f"weights of {copy.size / 1e9:.2f} GB in {len(arrived)} buckets, "
        f"from host memory into the other process by {backend}"
    )
    found.claim(
        text, "", f"{copy.size / took / 1e9:.2f} GB/s (the first, which connects, {times[0]:.1f} s)"
    )
    found.figures = {"backend": backend, "bytes": copy.size, "seconds": times}


def _weights(setting: Setting) -> dict[str, Tensor]:
    """Returns random weights on the device: 3 MB, or 4 GB."""
    torch.manual_seed(0)
    side = 256 if setting.small else 8192
    count = 24 if setting.small else 30
    tensors = {
        f"layer.{i}.weight": torch.randn(side, side, device=setting.device).bfloat16()
        for i in range(count)
    }
    return tensors | {"norm.weight": torch.randn(side + 3, device=setting.device)}


def _answer(pipe: Any) -> Any:
    """Returns what the other process says. Raises RuntimeError when it has failed or is silent."""
    if not pipe.poll(_TIMEOUT_S):
        raise RuntimeError(f"the receiving process has not answered for {_TIMEOUT_S} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError("the receiving process has ended: see the log") from None
    if isinstance(answer, Exception):
        raise RuntimeError(f"the receiving process: {answer}")
    return answer


def _receive(plan_body: dict[str, Any], pipe: Any) -> None:
    """Receives the versions as SGLang does, on the second GPU; ends with the checksums of what it
    has.
    """
    try:
        plan = Broadcast.model_validate(plan_body)
        on_gpu = plan.backend == "nccl"
        device = torch.device("cuda", 1) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        group = join(
            plan.master_address,
            plan.master_port,
            rank=plan.ranks["engine"],
            world_size=plan.world_size,
            name=plan.group,
            backend=plan.backend,
            timeout_s=_TIMEOUT_S,
        )
        held: dict[str, Tensor] = {}
        for _ in range(_ROUNDS):
            for bucket in plan.buckets:
                flat = torch.empty(size_of(bucket), dtype=torch.uint8, device=device)
                dist.broadcast(flat, src=0, group=group)
                held.update(views(flat, bucket))
            if on_gpu:
                torch.cuda.synchronize(device)
            pipe.send([bucket.names[0] for bucket in plan.buckets])
            pipe.recv()
        pipe.send({name: _sum(tensor) for name, tensor in held.items()})
    except Exception as error:
        pipe.send(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))
        raise


def _sum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
