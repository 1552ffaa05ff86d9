"""One node of the local runner whose log file cannot be written."""

import os
import sys
from pathlib import Path

import pytest

from jobgroup.local.node import Node
from jobgroup.local.output import Screen

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's full disk"),
]


async def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    node = Node(
        "main-0",
        "for i in 1 2 3; do echo line $i; sleep 0.1; done; exit 3",
        env=os.environ,
        workdir=Path.cwd(),
        log=Path("/dev/full"),
        screen=Screen(["main-0"]),
        grace_s=1.0,
    )
    assert await node.ended == 3
    assert list(node.last_lines) == [b"line 1", b"line 2", b"line 3"]
    out = capfd.readouterr().out
    assert out.count("lines are missing in /dev/full: [Errno 28] No space left on device") == 1
    assert out.count("main-0   | line") == 3
