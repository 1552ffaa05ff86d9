"""One of two real ranks never reaches a collective: each rank, also the one that waits in it,
reports where it is."""

import os
from pathlib import Path

import pytest

from tests.support.processes.forks import Forked
from tests.support.processes.ports import free_port
from tests.support.processes.waits import until

pytestmark = pytest.mark.integration


def test_every_rank_says_where_it_is(tmp_path: Path) -> None:
    shared = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    wanted = {0: "in all_reduce", 1: "threading.Event().wait()"}
    ranks: list[Forked] = []
    output = tmp_path / "output.txt"
    try:
        for rank in wanted:
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                Forked("tests.support.workers.stalled_ranks", str(tmp_path), log=output, env=env)
            )
        for rank, place in wanted.items():
            log = tmp_path / f"rank{rank}.log"
            said = (
                "nothing has happened for ",
                "; this process is at: the update of step 3",
                place,
                "stalled_ranks.py",
            )
            until(
                lambda: log.exists() and all(text in log.read_text() for text in said),  # noqa: B023
                output,
                *ranks,
            )
    finally:
        for process in ranks:
            process.kill()
            process.wait()
