"""However a run ends, none of its processes is left."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

if TYPE_CHECKING:
    from tests.support.processes.local_run import LocalRun

HEADER = "name: small\nexecution: parallel\nprimary_tasks: [main]\n"
# A daemon that leaves its session and then its parent, a child in the background, and the command
# itself.
DEEP = "setsid bash -c 'setsid sleep 601 & sleep 602' & sleep 603 & touch $FOLDER/up-$SKYPILOT_NODE_RANK; sleep 604"
TREE = f"{HEADER}---\nname: main\nnum_nodes: 2\nrun: |\n  {DEEP}\n"


def _up(local: "LocalRun") -> bool:
    sleeping = set()
    for process in local.marked():
        with suppress(psutil.NoSuchProcess):  # the process has just ended
            sleeping |= {word for word in process.cmdline() if word.startswith("60")}
    return (
        (local.folder / "up-0").exists() and (local.folder / "up-1").exists() and len(sleeping) == 4
    )


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_runner_ends_everything(
    local: "LocalRun", number: int, status: int
) -> None:
    process = local.start(TREE)
    local.wait_for(lambda: _up(local))
    process.send_signal(number)
    assert local.finish()[0] == status
    assert local.marked() == []


def test_kill_9_of_the_runner_ends_everything(local: "LocalRun") -> None:
    process = local.start(TREE, "--grace", "1s")
    local.wait_for(lambda: _up(local))
    process.kill()
    local.wait_for(lambda: local.marked() == [])


def test_kill_9_of_a_launcher_is_a_failure_of_its_node_and_leaves_nothing(
    local: "LocalRun",
) -> None:
    process = local.start(TREE)
    local.wait_for(lambda: _up(local))
    launcher = psutil.Process(process.pid).children()[0]
    launcher.kill()
    status, out, _ = local.finish()
    assert status == 137
    assert "was killed by SIGKILL (status 137" in out
    assert local.marked() == []


def test_a_command_that_ends_takes_its_background_processes_with_it(local: "LocalRun") -> None:
    status, _, _ = local.run(
        f"{HEADER}---\nname: main\nrun: setsid sleep 600 & sleep 601 & exit 0\n"
    )
    assert status == 0
    assert local.marked() == []


def test_sigterm_is_given_time_before_sigkill(local: "LocalRun") -> None:
    polite = "trap 'sleep 0.3; echo flushed; exit 0' TERM; touch $FOLDER/polite; while true; do sleep 0.02; done"
    deaf = "trap '' TERM; touch $FOLDER/deaf; while true; do sleep 0.02; done"
    status, _, _ = local.run(
        f'{HEADER}---\nname: polite\nrun: "{polite}"\n---\nname: deaf\nrun: "{deaf}"\n'
        "---\nname: main\nrun: until [ -e $FOLDER/polite -a -e $FOLDER/deaf ]; do sleep 0.02; done\n",
        *("--grace", "2s"),
    )
    assert status == 0
    assert local.log("polite-0").endswith("flushed\n")
    assert local.marked() == []


def test_a_second_ctrl_c_kills_at_once(local: "LocalRun") -> None:
    deaf = "trap '' TERM INT; touch $FOLDER/deaf; while true; do sleep 0.02; done"
    process = local.start(f'{HEADER}---\nname: main\nrun: "{deaf}"\n', "--grace", "1h")
    local.wait_for(lambda: (local.folder / "deaf").exists())
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while b"ending every task" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert local.finish()[0] == 130
    assert local.marked() == []


def test_a_reader_that_goes_away_ends_the_run(local: "LocalRun") -> None:
    process = local.start(
        f"{HEADER}---\nname: main\nrun: while true; do echo more; sleep 0.01; done\n"
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=400) == 129
    assert local.marked() == []


CLOSING = """
import asyncio, signal, sys
from jobgroup.local.__main__ import main

class Loop(asyncio.SelectorEventLoop):
    def _close_self_pipe(self):
        super()._close_self_pipe()
        signal.raise_signal(signal.SIGCHLD)

asyncio.DefaultEventLoopPolicy._loop_factory = Loop
sys.exit(main())
"""


def test_a_process_that_ends_while_the_runner_does_leaves_no_error(local: "LocalRun") -> None:
    (local.folder / "group.yaml").write_text(f"{HEADER}---\nname: main\nrun: exit 0\n")
    command = [sys.executable, "-c", CLOSING, "group.yaml", "--log-dir", "logs"]
    ended = subprocess.run(
        command,
        cwd=local.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
