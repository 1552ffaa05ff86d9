"""However a run ends, none of its processes is left."""

import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

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
    process.wait()
    local.wait_for(lambda: local.marked() == [])


def test_what_a_command_leaves_behind_is_given_time_too(local: "LocalRun") -> None:
    """Bash ends at SIGTERM at once; the program that it waits for is told afterwards."""
    polite = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit('flushed'))"
    )
    script = f'python3 -c "{polite}; print(1, flush=True); time.sleep(600)"\n  echo never'
    process = local.start(f"{HEADER}---\nname: main\nrun: |\n  {script}\n", "--grace", "100s")
    local.wait_for(lambda: local.log("main-0") == "1\n")
    process.terminate()
    assert local.finish()[0] == 143
    assert local.log("main-0") == "1\nflushed\n"
    assert local.marked() == []


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
