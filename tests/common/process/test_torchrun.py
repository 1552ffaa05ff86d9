"""Starting torchrun when its port is taken."""

import os
import socket
import subprocess
import sys

import pytest

from common.process.topology import Topology


@pytest.mark.integration
def test_a_taken_port_of_torchrun_is_one_line_with_the_remedy() -> None:
    # 127.N.… gets port 29500 + N; choose a block that no other run on this machine uses.
    for block in range(240, 250):
        port = Topology(local_hosts={"a": None}, node_ips=(f"127.{block}.0.1",)).torchrun_port  # type: ignore[dict-item]
        try:
            taken = socket.create_server(("", port))
            break
        except OSError:
            continue
    env = os.environ | {
        "SKYPILOT_JOBGROUP_NAME": "g",
        "JOBGROUP_HOSTS": f"a-0.g=127.{block}.0.1",
        "SKYPILOT_NODE_IPS": f"127.{block}.0.1",
    }
    with taken:
        command = [sys.executable, "-m", "common.process.topology", "torchrun", "-m", "trainer"]
        ended = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.returncode == 2
    assert f"torchrun cannot listen on port {port}" in ended.stderr
    assert "remedy: end the process that uses it" in ended.stderr
    assert "Traceback" not in ended.stderr
