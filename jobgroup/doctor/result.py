"""What a check finds, and how checks are run: all at once, each within its time, none able to end the others."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from common.errors import ServiceError
from common.security import Hider

_SLOW = "what it asks hangs, or this machine is overloaded"


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""
    """What to do about it; never empty unless the state is ok."""

    def text(self) -> str:
        """For people: one line, and under it what to do."""
        line = f"{'FAIL' if self.state == 'fail' else self.state:<4}  {self.name}: {self.found}"
        return f"{line}\n      mend: {self.mend}" if self.mend else line


def ok(name: str, found: str) -> Result:
    return Result(name, "ok", found)


def warn(name: str, found: str, mend: str) -> Result:
    return Result(name, "warn", found, mend)


def fail(name: str, found: str, mend: str) -> Result:
    return Result(name, "fail", found, mend)


def failed(name: str, error: ServiceError) -> Result:
    """An error of the project, whose remedy is what to do."""
    where = "" if error.field is None else f" · field: {error.field}"
    value = "" if error.value is None else f" · value: {error.value}"
    return fail(name, f"{error.message}{where}{value}", error.remedy or f"change {error.field or 'it'}")


@dataclass(frozen=True)
class Check:
    """A check: named, and bounded in time."""

    name: str
    run: Callable[[], Iterable[Result]]
    limit_s: float = 15.0
    late: Literal["warn", "fail"] = "fail"
    """What it is when it is not done by then."""


def perform(checks: Sequence[Check]) -> Iterator[Result]:
    """The results of all checks, in their order. A check that raises, or is not done in time, is a failed line."""
    found: list[list[Result]] = [[] for _ in checks]

    def run(results: list[Result], check: Check) -> None:
        try:
            for result in check.run():
                results.append(result)
        except ServiceError as error:
            results.append(failed(check.name, error))
        except subprocess.TimeoutExpired as error:
            results.append(fail(check.name, f"no answer within {error.timeout:.0f} s", _SLOW))
        except Exception as error:
            told = f"the check itself failed: {type(error).__name__}: {error}"
            results.append(fail(check.name, told, "look at it by hand, and report this line"))

    start = time.monotonic()
    # Daemons: one that hangs in the kernel, as on a dead network disk, must not keep the command from ending.
    threads = [threading.Thread(target=run, args=each, daemon=True) for each in zip(found, checks, strict=True)]
    for thread in threads:
        thread.start()
    for thread, check, results in zip(threads, checks, found, strict=True):
        thread.join(max(0.0, start + check.limit_s - time.monotonic()))
        yield from [*results]
        if thread.is_alive():
            yield Result(check.name, check.late, f"not done after {check.limit_s:.0f} s", _SLOW)


def hidden(result: Result, hiders: Iterable[Hider]) -> Result:
    """The result without the values of secrets, whatever brought them into it."""
    found, mend = result.found, result.mend
    for hider in hiders:
        found, mend = hider.text(found), hider.text(mend)
    return replace(result, found=found, mend=mend)


def gb(size: float) -> str:
    """Bytes as decimal gigabytes."""
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
