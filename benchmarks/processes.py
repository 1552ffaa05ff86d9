"""Processes of a benchmark: services that run beside it, and runs that it waits for."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = Path(".venv-trl/bin/python")
_PATIENCE_S = 600.0
_POLL_S = 0.02
_CALL = """
import importlib, json, sys
module, name, arguments = json.loads(sys.argv[1])
getattr(importlib.import_module(module), name)(*arguments)
"""
_END_S = 30.0
"""Seconds from SIGTERM to SIGKILL."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def local_url() -> str:
    """Returns the address of a service to be started on a free port of this machine."""
    return f"http://127.0.0.1:{free_port()}"


def engine_command(model: Path, url: str, **options: object) -> list[str]:
    """Returns the command of `processes` for the embedded engine at this address."""
    words = ["-m", "services.engine", "--model-path", str(model), "--port", url.rpartition(":")[2]]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def calling(function: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the command of `processes` that calls a function of a module with these arguments,
    which JSON can hold.
    """
    module = function.__module__
    if module == "__main__":  # of `python -m benchmarks.NAME`
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
    return ["-c", _CALL, json.dumps([module, function.__name__, arguments])]


@contextmanager
def processes(
    commands: Sequence[Sequence[str]], urls: Sequence[str] = (), *, disposable: bool = False
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Runs `python` with each of these commands inside the context; yields the processes once all
    `urls` are healthy.

    Raises RuntimeError when a process ends before that, TimeoutError when it takes too long. Output
    of `disposable` processes is discarded, and they are killed in the end, which takes no time.
    """
    env = {**os.environ, "LOG_LEVEL": "WARNING", "PYTHONPATH": str(ROOT)}
    output = subprocess.DEVNULL if disposable else None
    running = list["subprocess.Popen[bytes]"]()
    try:
        for words in commands:
            command = [sys.executable, *words]
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
            running.append(process)
        _wait(running, urls)
        yield running
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL if disposable else signal.SIGTERM)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()


def _wait(running: Sequence["subprocess.Popen[bytes]"], urls: Sequence[str]) -> None:
    """Waits until all `urls` answer /health with success."""
    limit = time.monotonic() + _PATIENCE_S
    for url in urls:
        healthy = False
        while not healthy:
            for process in running:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
            if time.monotonic() > limit:
                raise TimeoutError(f"{url} is not healthy after {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
            with suppress(httpx.TransportError):
                healthy = httpx.get(f"{url}/health", trust_env=False).is_success


def run(log: Path, *command: str | Path, **variables: str) -> None:
    """Runs a command to its end, with its output in `log`. Raises ConfigError with the last lines
    when it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, check=False)
    status = ended.returncode
    if status:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        reason = f"a run ended with status {status}, and these lines last:\n{tail}"
        raise ConfigError(reason, field=log.name, value=" ".join(map(str, command)))


def require_trl() -> None:
    """Raises ConfigError unless TRL's environment is there."""
    if not TRL_PYTHON.exists():
        raise ConfigError(
            "TRL's environment is not there",
            value=str(TRL_PYTHON),
            remedy="`make bench-trl` makes it",
        )
