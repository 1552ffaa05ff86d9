"""Runs several real ranks of a worker on this machine."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.processes.forks import Forked
from tests.support.processes.ports import free_port

LIMIT_S = 450.0
"""Less than pytest's own limit, 500 s in `make test`: it would not say what the ranks said."""


def run_ranks(count: int, worker: str, *arguments: str) -> None:
    """Runs a module of `tests.support.workers` on `count` ranks over gloo, with torchrun's
    environment.

    If a rank fails or LIMIT_S is over, kills the others and raises RuntimeError with the output of
    all ranks.
    """
    port = str(free_port())
    shared = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks: list[Forked] = []
    with TemporaryDirectory() as logs:
        try:
            for rank in range(count):
                environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                module = f"tests.support.workers.{worker}"
                ranks.append(
                    Forked(module, *arguments, env=environment, log=Path(logs) / str(rank))
                )
            limit = time.monotonic() + LIMIT_S
            while (statuses := [rank.poll() for rank in ranks]) != [0] * count:
                if any(statuses) or time.monotonic() > limit:
                    output = "\n".join(
                        path.read_text(errors="replace")[-5000:]
                        for path in sorted(Path(logs).iterdir())
                    )
                    raise RuntimeError(f"the ranks of {worker} ended with {statuses}:\n{output}")
                time.sleep(0.02)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
