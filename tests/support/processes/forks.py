"""Runs modules in forks of a process that has imported torch and transformers: a second per start
instead of six."""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.paths import ROOT

_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.workers.preloaded"])
_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_ARENA_MAX": "2",
}
"""The environment variables that the forking process reads at import."""
_PR_SET_PDEATHSIG = 1


class Forked:
    """Runs `python -m MODULE ARGUMENTS` in a forked process that leads a group and ends with this
    one.

    It has the methods of `subprocess.Popen` that tests use.
    """

    stdin = None

    def __init__(
        self, module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        call = (
            module,
            arguments,
            dict(os.environ if env is None else env) | _ENVIRONMENT,
            str(log),
        )
        self._process = _CONTEXT.Process(target=_run, args=call, daemon=True)
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            self._process.start()
        self.pid = int(self._process.pid)

    def poll(self) -> int | None:
        """Returns the exit status, None while the process runs, or the negative number of the
        signal that ended it."""
        status: int | None = self._process.exitcode
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status; raises subprocess.TimeoutExpired if it still runs after
        `timeout` seconds."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._module, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The forking process reaps its children before it tells their exit status.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    """Runs the module in the forked process and appends its output to the file `log`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where the tests are a shell's background job
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
