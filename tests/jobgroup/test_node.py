"""One node of the local runner: its log cannot be written, or it is killed while it starts."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from common.process.child import Child
from jobgroup.local import node as node_module
from jobgroup.local.node import Node
from jobgroup.local.output import Screen
from tests.support.processes.waits import comes

pytestmark = pytest.mark.integration


def node_of(script: str, log: Path, grace_s: float) -> Node:
    return Node(
        "main-0",
        script,
        env=os.environ,
        workdir=Path.cwd(),
        log=log,
        screen=Screen(["main-0"]),
        grace_s=grace_s,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's full disk")
async def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = "for i in 1 2 3; do echo line $i; sleep 0.1; done; exit 3"
    node = node_of(script, Path("/dev/full"), grace_s=1.0)
    assert await node.ended == 3
    assert list(node.last_lines) == [b"line 1", b"line 2", b"line 3"]
    out = capfd.readouterr().out
    assert out.count("lines are missing in /dev/full: [Errno 28] No space left on device") == 1
    assert out.count("main-0   | line") == 3


async def test_a_node_that_is_killed_while_it_starts_is_given_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    start = Child.start

    async def start_late(*arguments: Any, **options: Any) -> Child:
        child = await start(*arguments, **options)
        await comes(lambda: b"deaf" in log.read_bytes(), log)
        return child

    monkeypatch.setattr(Child, "start", start_late)
    # It kills all children of the runner's process, which here is that of the tests.
    monkeypatch.setattr(node_module, "_kill_orphans", lambda: None)
    node = node_of("trap '' TERM; echo deaf; sleep 3600", log, grace_s=3600)
    node.kill()
    assert await node.ended == 137
