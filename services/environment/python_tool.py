"""The built-in tool `python`: runs programs of the model in the sandbox of code rewards."""

import functools
import os

from common import Json
from services.environment.outcome import EnvironmentLost
from services.sandbox.cases import Case, CaseResult
from services.sandbox.sandbox import Limits, Sandbox, SandboxFault

TIMEOUT_S = 5.0
MEMORY_MB = 512
OUTPUT_KB = 16


class _OutputCase(Case):
    """Runs a program; its result is its printed output."""

    def verdict(self, done: Json) -> CaseResult:
        seconds = float(done["seconds"])
        if done["status"] != "done":
            return CaseResult(done["status"], seconds, str(done["detail"]))
        return CaseResult("passed", seconds, str(done["output"]))


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(Limits(TIMEOUT_S, MEMORY_MB, OUTPUT_KB), os.cpu_count() or 1)


class PythonEnvironment:
    """One tool, `python`. The last answer is graded by the run's reward functions."""

    @staticmethod
    def _prepare() -> None:
        """Tests the sandbox. Raises ConfigError when it does not work here."""
        _sandbox()

    def reset(self) -> None:
        """Begins an episode."""

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it printed. Every program starts anew: nothing is
        kept.

        Args:
            code: The program. Use print() to see a result.
        """
        case = _OutputCase({"kind": "stdin", "input": ""})
        try:
            (result,) = _sandbox().run(code, [case])
        except SandboxFault as error:
            raise EnvironmentLost(f"the sandbox failed: {error}") from error
        if result.status == "starved":
            raise EnvironmentLost("the machine is too busy to run programs")
        if result.status == "passed":
            return result.detail or "(nothing was printed)"
        return f"{result.status}: {result.detail}" if result.detail else result.status
