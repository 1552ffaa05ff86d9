"""The real `python -m services.reward`: hung graders, clients that disconnect, and no process left
behind."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import httpx
import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.processes.processes import alive
from tests.support.processes.waits import until

pytestmark = pytest.mark.integration

HANG = {"response": "\\boxed{\\sum_{i=1}^{1000000000} \\frac{1}{i}}", "ground_truth": "x"}


class Server:
    """A reward-server process on a free port."""

    def __init__(self, state: Path, timeout_s: float, *more: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "services.reward",
            "--reward.port",
            str(port),
        ]
        if "--reward.functions" not in more:
            more = (
                "--reward.functions",
                f'{{"name": "math", "timeout_s": {timeout_s}}}',
                *more,
            )
        command += ["--state_dir", str(state), *more]
        self.process = subprocess.Popen(command, cwd=ROOT)  # pytest shows its log
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=400)
        self.graders: list[psutil.Process] = []
        until(self.healthy, "it is healthy", self.process)
        self.note_graders()

    def healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def note_graders(self) -> None:
        self.graders += psutil.Process(self.process.pid).children(recursive=True)

    def unfinished(self) -> int:
        return int(self.http.get("/stats").json()["unfinished"])

    def start_hanging_request(self) -> socket.socket:
        body = httpx.Request("POST", "http://x", json={"items": [HANG] * 10}).read()
        client = socket.create_connection((self.http.base_url.host, self.http.base_url.port or 0))
        head = (
            "POST /batch_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: self.unfinished() == 10, "ten answers wait", self.process)
        return client

    def left(self) -> list[psutil.Process]:
        return [process for process in self.graders if alive(process.pid)]


class Start(Protocol):
    """Starts a server."""

    def __call__(self, timeout_s: float, *more: str) -> Server: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def go(timeout_s: float, *more: str) -> Server:
        servers.append(Server(tmp_path, timeout_s, *more))
        return servers[-1]

    yield go
    for server in servers:
        server.http.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def test_sigterm_leaves_no_process(start: Start) -> None:
    server = start(1.0)
    answer = server.http.post(
        "/batch_reward", json={"items": [{"response": "\\boxed{1+x}", "ground_truth": "x+1"}]}
    )
    assert [result["reward"] for result in answer.json()["rewards"]] == [1.0]
    assert len(server.graders) >= 3
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(400) in (0, -signal.SIGTERM)
    until(lambda: not server.left())


def test_a_client_that_hangs_up_frees_its_graders_and_kill_9_leaves_no_process_even_when_graders_hang(
    start: Start,
) -> None:
    server = start(1000.0)
    server.start_hanging_request().close()
    until(lambda: server.unfinished() == 0)
    answer = server.http.post("/reward", json={"response": "\\boxed{1+x}", "ground_truth": "x+1"})
    assert answer.json()["correct"] is True
    with server.start_hanging_request():
        server.note_graders()
        assert len(server.left()) >= 3
        server.process.kill()
        server.process.wait(400)
        until(lambda: not server.left())


def test_custom_functions_run_in_the_real_server_and_leave_no_process(start: Start) -> None:
    own = "tests.support.services.own_rewards:Moody"
    server = start(
        1.0,
        "--reward.functions",
        f'["math", {{"name": "{own}", "weight": 2}}]',
        "--reward.function_timeout_s",
        "1",
    )
    server.note_graders()
    items = [{"response": text, "ground_truth": "5"} for text in ("5", "hang", "die", "6")]
    answer = server.http.post("/batch_reward", json={"items": items}).json()
    found = [(result["reward"], result["status"]) for result in answer["rewards"]]
    assert found == [(2.0, "ok"), (None, "timeout"), (None, "died"), (1.0, "ok")]
    server.process.kill()
    server.process.wait(400)
    until(lambda: not server.left())


def test_a_function_that_does_not_exist_ends_the_start_with_its_name(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "services.reward",
        "--state_dir",
        str(tmp_path),
        "--reward.functions",
        "no.such:Thing",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 2
    assert "no.such:Thing" in ended.stderr
    assert "remedy" in ended.stderr
