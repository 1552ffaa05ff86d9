"""Run on every node: ranks that watch each other and play the part that the test names.

`step`: collectives for ever. `leave`: rank 0 is told to end before rank 1 has joined. `compute`:
rank 1 multiplies matrices for three times the limit and ends; rank 0 ends much later. `wait`: rank 0 waits for something other than a collective. `fail`:
rank 1 raises its own error. `load`: rank 1 loads for five times the limit, which is then that of all
ranks without progress, while rank 0 waits for it. `stuck`: rank 1 stops loading in the middle.
`ask`: rank 0 asks where rank 1 is, which waits for it in a collective, until that answers, and then
until it does not.
"""

import asyncio
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from common.errors import ServiceError
from common.process import progress, watchdog
from common.process.topology import Topology
from learning.liveness import Liveness
from learning.ranks import Ranks, end

_open_connection = asyncio.open_connection


async def _open_late(**options: Any) -> Any:
    """Opens a connection as a rank does that has hardly any processor time."""
    await asyncio.sleep(2)
    return await _open_connection(**options)


def _load(weights: Path, seconds: float, *, stops: bool) -> None:
    """Reads large pieces slowly, like a library that loads a model in one call."""
    weights.write_bytes(b"\1" * (20 << 20))
    with progress.working():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            weights.read_bytes()
            time.sleep(0.3)
            if stops:
                time.sleep(600)


def _ask(directory: Path) -> None:
    """Writes what is said of rank 1 once it is in the collective, and once it does not answer."""
    for name, said in (
        ("where", lambda rank: "in all_reduce" in rank.stacks),
        ("silent", lambda rank: rank.pid == 0),
    ):
        (rank,) = watchdog.other_ranks()
        while not said(rank):
            (rank,) = watchdog.other_ranks()
        (directory / f"{name}.partial").write_text(rank.model_dump_json())
        (directory / f"{name}.partial").rename(directory / f"{name}.json")


def main(directory: Path, part: str, limit_s: float) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    with Ranks.from_env(join_s=600) as ranks, ExitStack() as stack:
        if part == "leave" and not ranks.is_rank_zero:
            asyncio.open_connection = _open_late  # type: ignore[assignment]
        loads = part in ("load", "stuck")
        lost_after_s = 600.0 if loads else limit_s
        stuck_after_s = limit_s if loads else 600.0
        stack.enter_context(watchdog.stalls())
        stack.enter_context(
            Liveness(ranks, Topology.from_env(), lost_after_s, stuck_after_s=stuck_after_s)
        )
        (directory / f"ready{ranks.rank}").touch()
        if part == "leave" and ranks.is_rank_zero:
            signal.raise_signal(signal.SIGTERM)
        ranks.barrier()
        begin = time.monotonic()
        if part == "fail" and ranks.rank == 1:
            raise ServiceError("no room on the device")
        if part == "wait" and ranks.is_rank_zero:
            time.sleep(600)
        if loads and ranks.rank == 1:
            watchdog.at("loading the model")
            _load(directory / "weights", 5 * limit_s, stops=part == "stuck")
        if loads:
            watchdog.at("waiting for the other ranks")
            ranks.barrier()
        if part == "compute" and ranks.rank == 1:
            matrix = torch.rand(3000, 3000)
            while time.monotonic() - begin < 3 * limit_s:
                matrix = matrix @ matrix / 3000
        if part == "ask":
            if ranks.is_rank_zero:
                _ask(directory)
            ranks.sum(torch.ones(1000))
        while part in ("step", "wait", "fail"):
            ranks.sum(torch.ones(1000))
            time.sleep(0.01)
        if part == "compute":
            ranks.barrier()
            if ranks.is_rank_zero:
                time.sleep(3 * limit_s)
    (directory / f"done{ranks.rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    end()
