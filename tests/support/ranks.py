"""Several real ranks of a worker, on this machine."""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.paths import ROOT

LIMIT_S = 600.0
"""Less than pytest's own limit, so that a test that takes too long leaves no rank behind."""
_processes: Any = multiprocessing.get_context("forkserver")
# One process imports torch, and every rank is a fork of it: a second instead of six.
_processes.set_forkserver_preload(["tests.support.workers.preloaded"])


def run_ranks(count: int, worker: str, *arguments: str, limit_s: float = LIMIT_S) -> None:
    """Runs a module of `tests.support.workers` on `count` ranks over gloo, with the environment that torchrun gives them.

    Raises RuntimeError with the output of all ranks when one fails or `limit_s` is over; the others are killed then.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "PYTHONPATH": str(ROOT)}
    os.environ["PYTHONPATH"] = str(ROOT)  # of the process that forks, if this starts it
    with TemporaryDirectory() as logs:
        ranks = []
        for rank in range(count):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            call = (worker, arguments, environment, f"{logs}/{rank}")
            ranks.append(_processes.Process(target=_rank, args=call, daemon=True))
        try:
            for process in ranks:
                process.start()
            limit, running = time.monotonic() + limit_s, list(ranks)
            while running and all(not process.exitcode for process in ranks) and time.monotonic() < limit:
                wait([process.sentinel for process in running], limit - time.monotonic())
                running = [process for process in running if process.is_alive()]
        finally:
            statuses = [process.exitcode for process in ranks]
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        if any(status != 0 for status in statuses):
            output = "\n".join(path.read_text(errors="replace")[-5000:] for path in sorted(Path(logs).iterdir()))
            raise RuntimeError(f"the ranks of {worker} ended with {statuses}:\n{output}")


def _rank(worker: str, arguments: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    """Everything that a rank of this worker does. Its output goes to the file `log`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [worker, *arguments]
    runpy.run_module(f"tests.support.workers.{worker}", run_name="__main__", alter_sys=True)
