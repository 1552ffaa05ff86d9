"""One of two real ranks never reaches a collective: each rank, also the one that waits in it, reports where it is."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.integration


def test_every_rank_says_where_it_is(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    worker = ("-m", "tests.support.workers.stalled_ranks")
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output.txt").open("wb") as output:
        command = [sys.executable, *launcher, *worker, str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        wanted = {0: "in all_reduce", 1: "threading.Event().wait()"}
        limit = time.monotonic() + 400
        for rank, place in wanted.items():
            log = tmp_path / f"rank{rank}.log"
            said = ("nothing has happened for ", "; this process is at: the update of step 3", place, "stalled_ranks.py")
            while not (log.exists() and all(text in log.read_text() for text in said)):
                assert time.monotonic() < limit, (tmp_path / "output.txt").read_text()
                assert process.poll() is None, (tmp_path / "output.txt").read_text()
                time.sleep(0.1)
    finally:
        process.terminate()  # torchrun then ends its ranks, which have their own sessions
        process.wait(400)
