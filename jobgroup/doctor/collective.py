"""`python -m jobgroup.doctor.collective BACKEND WORLD`: processes that add up a tensor and check
the sum.

Rank 0 prints the seconds. A failure, or `TIMEOUT_S` without the others, ends with an error.
"""

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

TIMEOUT_S = 45.0


def worker(rank: int, backend: str, world: int, rendezvous: Path) -> None:
    """Runs one rank; over nccl it uses the GPU of its number."""
    if backend == "nccl" and (seen := torch.cuda.device_count()) != world:
        raise RuntimeError(
            f"torch sees {seen} GPUs of {world} (built for CUDA {torch.version.cuda})"
        )
    start, timeout = time.monotonic(), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, f"file://{rendezvous}", timeout, world, rank)
    tensor = torch.full(
        (1 << 20,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu"
    )
    dist.all_reduce(tensor)
    if {tensor.min().item(), tensor.max().item()} != {world * (world + 1) / 2}:
        raise RuntimeError(
            f"rank {rank} has the wrong sum {tensor.mean().item()}, {world * (world + 1) / 2} is right"
        )
    if rank == 0:
        print(f"{time.monotonic() - start:.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # fork: torch is imported once, and the parent has touched no GPU
        world, rendezvous = int(sys.argv[2]), Path(folder) / "rendezvous"
        start_processes(worker, (sys.argv[1], world, rendezvous), world, start_method="fork")
