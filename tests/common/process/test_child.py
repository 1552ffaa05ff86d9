"""Nothing of a command outlives it or its parent, not even a daemon that nothing ties to it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.process import child
from tests.support.processes.processes import alive

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
        while not noted.exists():
            time.sleep(0.01)
        if ends == "its parent":
            assert starter.stdin is not None
            starter.stdin.close()
        status = starter.wait(60)
    assert status == 3 or ends == "its parent"
    assert not alive(int(noted.read_text()))
