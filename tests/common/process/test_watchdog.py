"""A process that hangs reports where it hangs, without any preparation."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

HANGS = """
import sys, threading
from common.process import watchdog
from common.clients.data import DataClient
from common.process.logs import setup_logging
from common.process.loop_thread import LoopThread

setup_logging("hangs")
watchdog.LONG_S = 1.0
watchdog.start()
stall_s, deadline_s = float(sys.argv[2]), float(sys.argv[3])

async def ask(number):
    try:
        await client.prompts(1, str(number))
    finally:
        print("this call is over", flush=True)

def wait_in_the_main_thread():
    threading.Lock().acquire() and threading.Event().wait()

with watchdog.stalls(stall_s), LoopThread() as loop:
    watchdog.at("the update of step 7")
    client = DataClient("data-server", f"http://127.0.0.1:{sys.argv[1]}", deadline_s=deadline_s)
    calls = [loop.begin(ask(i)) for i in range(3)]
    print("ready", flush=True)
    wait_in_the_main_thread()
"""


class Hanging:
    """A real process whose tasks wait for a service that never answers and whose main thread waits
    forever."""

    def __init__(self, directory: Path, stall_s: float, deadline_s: float) -> None:
        self._silent = socket.create_server(("127.0.0.1", 0))
        self._log = directory / "log.txt"
        port = str(self._silent.getsockname()[1])
        command = [sys.executable, "-c", HANGS, port, str(stall_s), str(deadline_s)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env)
        self.says("ready")

    def says(
        self, *texts: str, after: str = "", meanwhile: Callable[[], None] | None = None
    ) -> str:
        """Returns the log once it contains all of these texts behind its beginning `after`. Calls
        `meanwhile` now and every few seconds until then."""
        limit = time.monotonic() + 300
        looks = 0
        while True:
            text = self._log.read_text()
            if looks and all(each in text[len(after) :] for each in texts):
                return text
            assert time.monotonic() < limit, text
            assert self.process.poll() is None, text
            if meanwhile and looks % 60 == 0:
                meanwhile()
            looks += 1
            time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._silent.close()


@pytest.fixture
def hanging(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hanging]:
    made = Hanging(tmp_path, *request.param)
    yield made
    made.end()


AWAITED = ("awaited: GET /prompts from data-server for ", ", 3 times")
STACKS = (
    "in wait_in_the_main_thread",
    "thread MainThread:",
    "thread collector:",
    "3 tasks at:",
    "in DataClient.prompts",
)


@pytest.mark.parametrize("hanging", [(3600, 3600)], indirect=True)
def test_sigusr1_shows_pending_calls_and_every_stack(hanging: Hanging) -> None:
    before = ""
    for _ in range(2):
        text = hanging.says(
            "where this process is (SIGUSR1)",
            *AWAITED,
            *STACKS,
            after=before,
            meanwhile=lambda: hanging.process.send_signal(signal.SIGUSR1),
        )
        before = text
    assert "nothing has happened" not in text
    assert "aiohttp" in text  # the stacks reach the innermost coroutine
    hanging.process.send_signal(signal.SIGQUIT)
    hanging.says("(most recent call first):")
    assert hanging.process.poll() is None


@pytest.mark.parametrize("hanging", [(2, 3600)], indirect=True)
def test_a_stall_is_reported_by_itself(hanging: Hanging) -> None:
    hanging.says(
        "nothing has happened for ", "; this process is at: the update of step 7", *AWAITED, *STACKS
    )
    silences: list[float] = []
    while len(silences) < 2:
        silences = [
            float(said)
            for said in re.findall(r"nothing has happened for (\d+) s", hanging.says("ready"))
        ]
        time.sleep(0.05)
    assert silences[0] >= 2
    assert silences[1] >= 4


@pytest.mark.parametrize("hanging", [(3600, 2)], indirect=True)
def test_a_missed_long_deadline_is_reported_once_for_all_calls(hanging: Hanging) -> None:
    hanging.says(
        "data-server did not answer GET /prompts within 2 s: ",
        "thread MainThread:",
        "awaited: GET /prompts",
    )
    while (text := hanging.says("this call is over")).count("this call is over") < 3:
        time.sleep(0.05)
    assert text.count("did not answer GET /prompts within 2 s") == 1


def test_a_call_that_keeps_the_interpreter_to_itself_is_shown() -> None:
    """No Python can run meanwhile: neither a thread nor a signal handler."""
    program = (
        "import re\n"
        "from common.process import watchdog\n"
        "def stuck_in_a_pattern():\n"
        "    re.match('(a+)+$', 'a' * 60 + '!')\n"
        "with watchdog.interpreter_guarded(stuck_s=0.5):\n"
        "    print('ready', flush=True)\n"
        "    stuck_in_a_pattern()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        assert any("in stuck_in_a_pattern" in line for line in lines)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
