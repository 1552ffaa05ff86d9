"""Nothing of a command outlives it or its parent, not even a daemon that nothing ties to it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.process import child
from common.process.child import Child, ChildOutput
from tests.support.processes.processes import alive
from tests.support.processes.waits import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="adoption of orphans is Linux's"),
]
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "~", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + "~", sys.argv[1])
        os.closerange(0, 3)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


@pytest.mark.parametrize("ends", ["the command", "its parent"])
def test_a_daemon_ends_with(ends: str, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    seconds = "0" if ends == "the command" else "1000"
    words = child.command([sys.executable, "-c", DAEMON, str(noted), seconds])
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as starter:
        until(noted.exists, "the daemon notes its id", starter)
        if ends == "its parent":
            assert starter.stdin is not None
            starter.stdin.close()
        status = starter.wait(60)
    assert status == 3 or ends == "its parent"
    assert not alive(int(noted.read_text()))


def _ignore(_: object) -> None:
    pass


async def test_output_is_logged_and_passed_on_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "0123456789abcdef")
    lines: list[bytes] = []
    output = ChildOutput(tmp_path / "logs/child.log", lines.extend, on_loss=_ignore, redacted=True)
    script = "printf 'token 01234567'; sleep 0.1; printf '89abcdef\\n\\nno end'; exit 3"
    running = await Child.start(["sh", "-c", script], output, env=os.environ)
    assert await running.wait() == 3
    assert await running.end() == 3
    assert lines == [b"token [secret]", b"", b"no end"]
    assert list(output.last_lines) == lines
    assert output.log_file.read_bytes() == b"token [secret]\n\nno end"


@pytest.mark.parametrize(("grace_s", "status"), [(0.0, 137), (300.0, 7)])
async def test_an_ended_child_has_the_grace_that_it_was_given(
    grace_s: float, status: int, tmp_path: Path
) -> None:
    ready = asyncio.Event()
    output = ChildOutput(tmp_path / "log", lambda _: ready.set(), on_loss=_ignore)
    script = "trap 'exit 7' TERM; echo ready; while true; do sleep 0.02; done"
    running = await Child.start(["sh", "-c", script], output, env=os.environ)
    await ready.wait()
    assert await running.end(grace_s) == status
    assert not alive(running.pid)


async def test_what_the_command_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    output = ChildOutput(tmp_path / "log", _ignore, on_loss=_ignore)
    running = await Child.start(
        ["/bin/sh", "-c", "sleep 600 & echo $!; exit 3"], output, env=os.environ
    )
    assert await asyncio.wait_for(running.wait(), 60) == 3
    await running.end()
    assert not alive(int(output.last_lines[0]))


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    output = ChildOutput(tmp_path / "log", _ignore, on_loss=_ignore)
    running = await Child.start(["/no/such/program"], output, env=os.environ)
    assert await running.wait() == 127
    await running.end()
    assert b"/no/such/program" in output.last_lines[0]


async def test_an_endless_line_without_a_newline_does_not_stop_the_child(tmp_path: Path) -> None:
    output = ChildOutput(tmp_path / "log", _ignore, on_loss=_ignore)
    code = "import sys; sys.stdout.write('x' * 1_000_000); sys.stdout.flush()"
    running = await Child.start([sys.executable, "-c", code], output, env=os.environ)
    assert await asyncio.wait_for(running.wait(), 60) == 0
    await running.end()
    assert output.log_file.stat().st_size == 1_000_000
