"""The sandbox for tests; if it does not work, they are skipped with its own reason."""

import contextlib
import time
from typing import Any

import psutil
import pytest

from common.errors import ConfigError
from services.reward.functions import CodeRewardFunction
from services.sandbox.cases import CaseResult


def code_function(**arguments: Any) -> CodeRewardFunction:
    try:
        return CodeRewardFunction(**arguments)
    except ConfigError as error:
        pytest.skip(str(error))


def sandboxes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() in ("bwrap", "python3"):
                found.append(process)
    return found


def run(code: CodeRewardFunction, source: str, expected: str = "contained\n") -> CaseResult:
    start = time.monotonic()
    [result] = code.results(source, [{"input": "", "output": expected}])
    assert time.monotonic() - start < 300, "it is bounded even on a busy machine"
    assert code.results("print(6 * 7)", [{"input": "", "output": "42"}])[0].status == "passed", (
        "the slots work on"
    )
    return result


def contained(code: CodeRewardFunction, attempts: list[str]) -> list[str]:
    """Returns the attempts that succeeded; each is an expression that must raise OSError."""
    source = "import ctypes, multiprocessing, os, socket, subprocess, fcntl, termios, time\n"
    source += "libc = ctypes.CDLL(None, use_errno=True)\n"
    source += "def denied(result):\n"
    source += "    if result < 0: raise OSError(ctypes.get_errno(), 'denied')\n"
    source += "    return result\n"
    source += f"for attempt in {attempts!r}:\n"
    source += "    try: eval(attempt)\n    except OSError: pass\n    else: print(attempt)\n"
    source += "print('contained')\n"
    result = run(code, source)
    if result.status == "passed":
        return []
    succeeded = []
    for attempt in attempts:
        alone = source.replace(repr(attempts), repr([attempt]))
        if code.results(alone, [{"input": "", "output": "contained"}])[0].status != "passed":
            succeeded.append(attempt)
    return succeeded or [f"{result}"]
