"""`python -m jobgroup.doctor.collective BACKEND WORLD`: processes that add up a tensor and check
the sum.

Rank 0 prints the seconds. A failure, or `TIMEOUT_S` without the others, ends with an error.
"""

import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

TIMEOUT_S = 45.0


def worker(rank: int, backend: str, world: int, folder: str) -> None:
    """Runs one rank; over nccl it uses the GPU of its number."""
    start = time.monotonic()
    dist.init_process_group(
        backend,
        f"file://{folder}/rendezvous",
        timeout=timedelta(seconds=TIMEOUT_S),
        world_size=world,
        rank=rank,
    )
    tensor = torch.ones(1 << 20, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(tensor)
    if not (tensor == world).all():
        raise RuntimeError(f"rank {rank} has the wrong sum")
    if rank == 0:
        print(f"{time.monotonic() - start:.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    processes = int(sys.argv[2])
    with tempfile.TemporaryDirectory() as shared:
        # fork: torch is imported once. The parent must not touch a GPU before.
        start_processes(
            worker, (sys.argv[1], processes, shared), nprocs=processes, start_method="fork"
        )
