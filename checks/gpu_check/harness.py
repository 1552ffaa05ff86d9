"""Sections as processes: each has a time limit and must write one line of JSON; otherwise it counts
as failed.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

_TAIL = 6
"""Number of log lines shown for a failed section."""

Verdict = Literal["holds", "fails", "measured", "not reached"]
"""`measured`: nothing was predicted. `not reached`: this machine or the time could not show it;
nothing is wrong."""


@dataclass(frozen=True)
class Claim:
    """A claim, what was predicted and measured, and the verdict."""

    text: str
    predicted: str
    measured: str
    verdict: Verdict = "measured"


@dataclass
class Findings:
    """The report of a section."""

    claims: list[Claim] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers for the table of updates, and for comparisons between sections."""
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    """Further tables by title; the first row is the head."""

    def claim(self, text: str, predicted: str, measured: str, holds: bool | None = None) -> None:
        """Adds a claim; without `holds` it is a measurement that proves nothing."""
        if holds is None:
            self.claims.append(Claim(text, predicted, measured))
        else:
            self.claims.append(Claim(text, predicted, measured, "holds" if holds else "fails"))

    def not_reached(self, text: str, why: str) -> None:
        """Adds a claim that this machine cannot show, and why."""
        self.claims.append(Claim(text, "", why, "not reached"))

    def at_most(self, text: str, value: float, limit: float, unit: str = "") -> None:
        """Claims that a value is at most `limit`; NaN is not."""
        self.claim(text, f"≤ {limit:.4g}{unit}", f"{value:.4g}{unit}", value <= limit)

    def at_least(self, text: str, value: float, limit: float, unit: str = "") -> None:
        """Claims that a value is at least `limit`; NaN is not."""
        self.claim(text, f"≥ {limit:.4g}{unit}", f"{value:.4g}{unit}", value >= limit)


@dataclass
class Outcome:
    """The outcome of a section."""

    name: str
    about: str
    seconds: float = 0.0
    error: str = ""
    """Why the section failed; empty if it completed or never started."""
    not_reached: str = ""
    """Why the section never started."""
    findings: Findings = field(default_factory=Findings)
    machine: str = ""
    """The GPU, or `cpu`."""
    small: bool = False
    """Whether it ran on tiny shapes."""

    @property
    def all_claims(self) -> list[Claim]:
        """The section's claims, preceded by one about the section itself if it did not complete."""
        claims = list(self.findings.claims)
        if self.error:
            claims.insert(0, Claim(self.about, "runs to its end", self.error, "fails"))
        if self.not_reached:
            claims.insert(0, Claim(self.about, "", self.not_reached, "not reached"))
        return claims

    def line(self) -> str:
        """Returns one line of strict JSON; a non-finite number is written as text."""
        return json.dumps(_finite(asdict(self)), ensure_ascii=False, allow_nan=False)

    @classmethod
    def of_line(cls, line: str) -> "Outcome":
        """Reads what `line` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        body = json.loads(line)
        return cls(**{**body, "findings": _findings(body["findings"])})


def run(name: str, about: str, command: Sequence[str], limit_s: float, directory: Path) -> Outcome:
    """Runs `command` with the path of its line as last argument; kills it and its children after
    `limit_s`.

    Output goes to `directory`/NAME.log. Anything but a complete line and exit status 0 is an error
    of the outcome.
    """
    line = directory / f"{name}.json"
    log = directory / f"{name}.log"
    start = time.perf_counter()
    line.unlink(missing_ok=True)
    outcome = Outcome(name, about)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(line)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            outcome.error = f"still ran after its limit of {limit_s:.0f} s"
        finally:  # also kills processes that the section left behind, and on Ctrl-C
            _kill_group(process)
    outcome.seconds = time.perf_counter() - start
    if not outcome.error and process.returncode:
        outcome.error = _ending(process.returncode)
    try:
        found = json.loads(line.read_text(encoding="utf-8"))
        outcome.findings = _findings(found)
        outcome.error = found["error"] or outcome.error
    except OSError:
        outcome.error = outcome.error or "ended without a result"
    except (ValueError, KeyError, TypeError):
        outcome.error = outcome.error or "left a result that cannot be read"
    if outcome.error:
        outcome.error += _log_tail(log)
    return outcome


def leave(path: Path, section: Callable[[Findings], None]) -> int:
    """Runs a section in this process and returns the exit status.

    Writes the section's line, which after an error holds the findings so far.
    """
    error = ""
    findings = Findings()
    try:
        section(findings)
    except MemoryError as caught:
        error = f"out of memory: {caught}"
    except Exception as caught:
        import traceback

        traceback.print_exc()
        first = next(iter(str(caught).strip().splitlines()), "")
        error = f"{type(caught).__name__}: {first}"
    body = {"error": error, **asdict(findings)}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(_finite(body), allow_nan=False))
        file.flush()
        os.fsync(file.fileno())
    sys.stdout.flush()
    return 1 if error else 0


def peak_host_bytes() -> int:
    """Returns the largest resident size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _findings(body: dict[str, Any]) -> Findings:
    claims = [Claim(**claim) for claim in body["claims"]]
    return Findings(claims, body["figures"], body["tables"])


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:  # macOS reports this for a group that holds only the dead process
        process.kill()
    process.wait()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (
        " (the kernel does that when memory is short)" if name == "SIGKILL" else ""
    )


def _log_tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL:]
    return "".join(f"\n{line[-300:]}" for line in lines)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
