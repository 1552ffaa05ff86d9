"""The first program in a sandbox, as a function: its limits, its socket and its exit status."""

import resource
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.environment.runtimes import inside


class Sockets:
    """Keeps the sockets that are made, which only the end of the process would close."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        made: list[socket.socket] = []

        class Kept(socket.socket):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **more)
                made.append(self)

        patch.setattr(socket, "socket", Kept)
        self.made = made

    def close(self) -> None:
        for each in self.made:
            each.close()


@given(st.integers(1, 1 << 40), st.integers(1, 5000), st.integers(-64, 255))
def test_a_command_runs_within_its_limits(memory: int, processes: int, status: int) -> None:
    limits: list[Any] = []
    commands: list[list[str]] = []

    class Child:
        def __init__(self, command: list[str], preexec_fn: Any) -> None:
            commands.append(command)
            preexec_fn()

        def wait(self) -> int:
            return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Child)
        patch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
        sockets = Sockets(patch)
        found = inside.main([f"{memory}", f"{processes}", "", "127.0.0.1", "80", "ls", "-l"])
        sockets.close()
    assert commands == [["ls", "-l"]]
    assert found == (status if status >= 0 else 128 + -status)
    assert dict(limits) == {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_NPROC: (processes, processes),
        resource.RLIMIT_CORE: (0, 0),
    }


def test_a_command_that_cannot_run_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file")

    monkeypatch.setattr(subprocess, "Popen", missing)
    sockets = Sockets(monkeypatch)
    assert inside.main(["1", "1", "", "127.0.0.1", "80", "prog", "x"]) == 127
    sockets.close()
    assert capsys.readouterr().err == "cannot run prog: No such file\n"


def test_the_server_gets_a_socket_that_listens_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays connected while the command runs: so the server knows when the sandbox has ended."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = str(Path(folder) / "gateway.sock")
        server.bind(path)
        server.listen()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        taken: list[Any] = []

        class Child:
            def __init__(self, *_: Any, **__: Any) -> None:
                sender = server.accept()[0]
                taken.append(sender)
                received = socket.recv_fds(sender, 10, 10)
                assert received[0] == b"1"
                (descriptor,) = received[1]
                with socket.socket(fileno=descriptor) as sock:
                    assert sock.getsockname() == ("127.0.0.1", port)
                    with socket.create_connection(("127.0.0.1", port)):
                        sock.accept()[0].close()
                sender.setblocking(False)
                with pytest.raises(BlockingIOError):
                    sender.recv(1)  # the other end is open
                sender.setblocking(True)

            def wait(self) -> int:
                return 0

        monkeypatch.setattr(subprocess, "Popen", Child)
        sockets = Sockets(monkeypatch)
        assert inside.main(["1", "1", path, "127.0.0.1", f"{port}", "prog"]) == 0
        (sender,) = taken
        client = next(each for each in sockets.made if each.family == socket.AF_UNIX)
        client.close()
        assert sender.recv(1) == b"", "its end is the end of the sandbox"
        sender.close()
        sockets.close()
