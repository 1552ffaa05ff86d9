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
    seen = torch.cuda.device_count()
    if backend == "nccl" and seen != world:
        raise RuntimeError(
            f"torch sees {seen} GPUs of {world} (built for CUDA {torch.version.cuda})"
        )
    start = time.monotonic()
    dist.init_process_group(
        backend,
        f"file://{rendezvous}",
        timeout=timedelta(seconds=TIMEOUT_S),
        world_size=world,
        rank=rank,
    )
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    tensor = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    right = world * (world + 1) / 2
    if not (tensor == right).all():
        raise RuntimeError(
            f"rank {rank} has the wrong sum {tensor.mean().item()}, {right} is right"
        )
    if rank == 0:
        print(f"{time.monotonic() - start:.1f}", flush=True)
    dist.destroy_process_group()


def main(backend: str, world: int) -> None:
    """Starts `world` processes and waits for them. Raises what one of them raises."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, world, Path(folder) / "rendezvous")
        # fork: torch is imported once. The parent must not touch a GPU before.
        start_processes(worker, arguments, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
