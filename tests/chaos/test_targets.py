"""Finding processes and acting on them, tested separately."""

import os
import signal
import socket
import subprocess
import sys
import uuid

import pytest

from tests.chaos.targets import Process, cut_connections, find, processes


def test_the_environment_server_is_not_the_process_that_keeps_it_alive() -> None:
    words = ("python", "-m", "services.environment")
    keeper = process(1, *words, task="environment-server", rank=1)
    server = process(2, *words, task="environment-server", rank=1)
    server.env["ENVIRONMENT_SUPERVISED"] = "1"
    assert find("environment-1", [keeper, server]) == server
    assert find("environment-0", [keeper, server]) is None


def process(pid: int, *argv: str, parent: int = 1, task: str = "", rank: int = 0) -> Process:
    env = (
        {"SKYPILOT_TASK_ID": f"local-1_rlhf-math_{task}", "SKYPILOT_NODE_RANK": str(rank)}
        if task
        else {}
    )
    return Process(pid, pid, parent, "S", argv, env)


@pytest.mark.parametrize("router", ["smg::router", "sglang::router"])
def test_names_stand_for_the_processes_that_do_the_work(router: str) -> None:
    launched = (
        "python",
        "-I",
        "-S",
        "/x/common/process/launcher.py",
        "10.0",
        "-",
        "bash",
        "-c",
        "exec .venv/bin/python -m services.rollout",
    )
    running = [
        process(1, "python", "-m", "jobgroup.local"),
        process(2, *launched, task="rollout-server", rank=1),
        process(3, "python", "-m", "services.rollout", task="rollout-server", rank=0),
        process(4, "python", "-m", "services.rollout", task="rollout-server", rank=1),
        process(
            5,
            "python",
            "-I",
            "-S",
            "child.py",
            "python",
            "-m",
            "services.engine",
            task="rollout-server",
            rank=1,
        ),
        process(6, "python", "-m", "services.engine", "--port", "1", task="rollout-server", rank=1),
        process(7, "python", "-P", "/x/services/reward/worker.py", "serve", task="reward-server"),
        process(
            8,
            "python",
            "-P",
            "/x/services/reward/worker.py",
            "serve",
            parent=7,
            task="reward-server",
        ),
        process(10, router, task="rollout-server"),
        process(9, "python", "-u", "-m", "trainer", task="ppo-trainer", rank=1),
    ]
    wanted = {
        "agent-0": 3,
        "agent-1": 4,
        "engine-1": 6,
        "grader": 8,
        "trainer-1": 9,
        "router": 10,
        "rollout-server-1": 2,
    }
    for target, pid in wanted.items():
        found = find(target, running)
        assert found is not None, target
        assert found.pid == pid
    for target in ("data-server", "engine-0", "trainer-0", "rollout-server-0"):
        assert find(target, running) is None


@pytest.mark.integration
def test_processes_are_found_by_their_mark_and_only_those() -> None:
    mark = str(uuid.uuid4())
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    environment = {
        **os.environ,
        "CHAOS_MARK": mark,
        "SKYPILOT_TASK_ID": "run_group_reward-server",
        "SKYPILOT_NODE_RANK": "2",
    }
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as child:
        [found] = processes(mark)
        assert (found.pid, found.parent, found.node) == (child.pid, os.getpid(), "reward-server-2")
        assert found.argv == tuple(command)
        child.send_signal(signal.SIGSTOP)
        while processes(mark)[0].state != "T":
            pass
        child.kill()
    assert processes(mark) == []


@pytest.mark.integration
def test_cutting_ends_the_connections_of_a_process_and_nothing_else() -> None:
    program = (
        "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
        "print('connected', flush=True); print(c.recv(1), flush=True); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as other,
            server.accept()[0] as accepted,
            subprocess.Popen(
                [sys.executable, "-c", program, str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as child,
            server.accept()[0] as connection,
        ):
            assert child.stdout is not None
            assert child.stdout.readline() == "connected\n"
            try:
                assert cut_connections(child.pid) == 1
            except PermissionError:
                child.kill()
                pytest.skip(
                    "this machine does not let a process take a copy of another one's sockets (pidfd_getfd)"
                )
            assert child.stdout.readline() == "b''\n", "the process sees that its peer has gone"
            assert connection.recv(1) == b"", "and the peer that the process has"
            assert child.poll() is None
            other.sendall(b"x")
            assert accepted.recv(1) == b"x"
            child.kill()
