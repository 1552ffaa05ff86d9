"""Checks and their results. They run concurrently, each within its time limit, and none can stop
the others.
"""

import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from common.errors import ConfigError, ServiceError
from common.models.memory import FITS_SHARE
from common.process.daemon_threads import in_daemon_thread
from common.process.security import SecretRedactor

State = Literal["ok", "warn", "fail"]
STATES: tuple[State, ...] = get_args(State)
_SLOW = "whatever it queries does not answer, or this machine is overloaded"


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    state: State
    found: str
    fix: str = ""
    """The remedy; empty only for `ok`."""

    def text(self) -> str:
        line = f"{'FAIL' if self.state == 'fail' else self.state:<4}  {self.name}: {self.found}"
        return f"{line}\n      fix: {self.fix}" if self.fix else line

    def redacted(self, redactor: SecretRedactor) -> "Result":
        return replace(self, found=redactor.redact(self.found), fix=redactor.redact(self.fix))


def expect(name: str, good: bool, found: str, fix: str, otherwise: State = "fail") -> Result:
    """Returns `ok` if `good`, else `otherwise` with the fix."""
    return Result(name, "ok", found) if good else Result(name, otherwise, found, fix)


def fits(name: str, found: str, needed: float, available: float, fix: str) -> Result:
    """Fails when more is needed than available, and warns when little would be left."""
    if needed > available:
        return Result(name, "fail", f"does not fit: {found}", fix)
    good = needed <= FITS_SHARE * available
    return expect(name, good, found if good else f"tight: {found}", fix, "warn")


def failed(name: str, error: ServiceError) -> Result:
    """Returns the failed line of an error of this project; its fix is the remedy."""
    found = error.message
    if error.field is not None:
        found += f" · field: {error.field}"
    if error.value is not None:
        found += f" · value: {error.value}"
    return Result(name, "fail", found, error.remedy or f"change {error.field or 'it'}")


Results = Iterator[Result]
Check = Callable[[], Iterable[Result]]
"""Yields results. A ConfigError that it raises is a failed line."""


def perform(checks: Mapping[str, Check], limit_s: float | None = 100.0) -> Results:
    """Runs all checks at once and yields their results in order. A check that raises, or is not
    done within `limit_s` seconds, is a failed line with its name.
    """
    running = {name: in_daemon_thread(partial(_run, name, checks[name]), name) for name in checks}
    for name, future in running.items():
        try:
            yield from future.result(limit_s)
        except TimeoutError:
            yield Result(name, "fail", f"not done after {limit_s:.0f} s", _SLOW)


def _run(name: str, check: Check) -> list[Result]:
    found = []
    try:
        for result in check():
            found.append(result)
    except ServiceError as error:
        found.append(failed(name, error))
    except Exception as error:
        found.append(
            Result(
                name,
                "fail",
                f"the check itself failed: {type(error).__name__}: {error}",
                "check this by hand, and report this line",
            )
        )
    return found


def ask(
    *command: object, fix: str, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
) -> str:
    """Runs a program and returns its standard output. Raises ConfigError with its last line and the
    fix.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=True, env=env
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr + error.stdout).strip().splitlines()
        problem = lines[-1] if lines else f"exit status {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        return done.stdout
    raise ConfigError(
        f"{words[0]} fails: {problem}", field=words[0], value=" ".join(words), remedy=fix
    )


def gb(size: float) -> str:
    """Bytes as decimal gigabytes."""
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
