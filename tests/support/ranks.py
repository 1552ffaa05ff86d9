"""Several real ranks of a worker script, on this machine."""

import os
import signal
import socket
import subprocess
import sys

from tests.support.paths import ROOT

LIMIT_S = 270.0
"""Less than pytest's own limit, so that a test that takes too long leaves no rank behind."""


def run_ranks(count: int, worker: str, *arguments: str, limit_s: float = LIMIT_S) -> None:
    """Runs a module of `tests.support.workers` on `count` ranks over gloo; raises when one fails or `limit_s` is over."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), "-m", f"tests.support.workers.{worker}", *arguments),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env) as launcher:
        try:
            status = launcher.wait(limit_s)
        except BaseException:
            launcher.send_signal(signal.SIGTERM)  # it ends its ranks; killed, it would leave them
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)
