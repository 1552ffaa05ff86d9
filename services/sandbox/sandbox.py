"""Runs programs against their test cases, each in its own sandbox, in parallel slots."""

import base64
import itertools
import json
import logging
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from common import Json
from common.errors import InvalidInput
from services.sandbox.cases import Case, CaseResult
from services.sandbox.command import (
    PACKAGES,
    VARIANTS,
    Interpreter,
    base_filter,
    bwrap_options,
    find_bwrap,
    inside_command,
    interpreters,
    threads_only_filter,
    unavailable,
)
from services.sandbox.meter import WALL_TIMES
from services.sandbox.selftest import PROBE_CASES, PROBE_SOURCE, PROBES
from services.sandbox.values import MAX_DEPTH

log = logging.getLogger(__name__)
SandboxKind = Literal["bubblewrap", "none"]

_TRIES = 3
_START_S = 20.0
_SLACK_S = 5.0
_END_S = 10.0
# Time for all cases of a program, as a multiple of the timeout of one case.
_TOTAL_TIMEOUTS = 5
_THREADS = 64
_STDERR_BYTES = 4096
# User of the first slot when the server runs as root, in a range that no distribution assigns.
_FIRST_UID = 60_600


class SandboxFault(Exception):
    """The sandbox itself failed, not the program."""


@dataclass(frozen=True)
class Limits:
    """Resources of one program."""

    timeout_s: float
    """Seconds for one case, as counted by `Meter`; all cases of a program share five times as
    much."""
    memory_mb: int
    """Address space of a program, which is a single process."""
    output_kb: int
    """Standard output of one case, and size of a value that it returns."""


class Sandbox:
    """Slots in which programs run. Thread-safe.

    Args:
        limits: resources of every program.
        slots: maximum concurrent programs.
        kind: `none` runs programs as this user without any protection except the limits.
        python: the interpreter for programs; when empty, one is found.

    Raises:
        ConfigError: the sandbox, which is tested with programs that try to break out, does not work
            here.
    """

    def __init__(
        self, limits: Limits, slots: int, kind: SandboxKind = "bubblewrap", python: str = ""
    ) -> None:
        self.limits = limits
        self.kind = kind
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._slots.put(slot)
        self._filter = b""
        self._bwrap = ""
        self._variant = VARIANTS[0]

        # The kernel counts threads per user: where another process of that user would be counted
        # too, there is no limit.
        counts_alone = os.geteuid() == 0 or _counts_per_namespace()
        self._threads = _THREADS if kind == "bubblewrap" and counts_alone else None

        candidates = interpreters(python)
        self._python = candidates[0]
        if kind == "none":
            log.warning(
                "programs run WITHOUT a sandbox, as this user: "
                "the reward function code has sandbox none"
            )
            return
        self._filter = base_filter()
        self._bwrap = find_bwrap()
        self._select_working(candidates)
        log.info("programs run in bubblewrap with %s, %s", self._python.executable, self._variant)

    def check(self, case: Case, where: str) -> None:
        """Raises InvalidInput for a case that no program passes here: its test imports a package
        that programs lack, or what it expects is over a limit.
        """
        lacking = case.imports.intersection(PACKAGES.split()) - self._python.modules
        if lacking:
            raise InvalidInput(
                f"the test imports {min(lacking)}, which programs do not have",
                field=where,
                value=min(lacking),
                remedy="name an interpreter that has it as `python` of the reward function code, "
                "or remove the test",
            )
        limit = self.limits.output_kb << 10
        try:
            size = case.expected_bytes
        except RecursionError:
            raise InvalidInput(
                f"the expected value has more than {MAX_DEPTH} levels",
                field=where,
                value=MAX_DEPTH,
                remedy="compare less of it in a test in Python",
            ) from None
        if size > limit:
            raise InvalidInput(
                f"the expected value has {size} bytes, over the limit of {limit}",
                field=where,
                value=size,
                remedy="raise `output_kb` of the reward function code",
            )

    def run(
        self, source: str, cases: Sequence[Case], *, stop_at_failure: bool = False
    ) -> list[CaseResult]:
        """Returns the result of each case; waits for a free slot.

        Args:
            source: the program.
            cases: its tests, in order.
            stop_at_failure: skip the cases after the first failure.

        Raises:
            SandboxFault: the sandbox failed several times in a row.
        """
        for attempt in range(_TRIES):
            slot = self._slots.get()
            try:
                return self._run_in(slot, source, cases, stop_at_failure=stop_at_failure)
            except (SandboxFault, OSError) as error:
                log.warning("the sandbox failed: %s", error)
                fault = error
            finally:
                self._slots.put(slot)
            time.sleep(0.1 * 2**attempt)
        raise SandboxFault(str(fault))

    def _run_in(
        self, slot: int, source: str, cases: Sequence[Case], *, stop_at_failure: bool
    ) -> list[CaseResult]:
        """Runs the cases in a new sandbox. Raises SandboxFault or OSError when that fails."""
        results: list[CaseResult] = []
        total_s = min(_TOTAL_TIMEOUTS, len(cases)) * self.limits.timeout_s
        limit_s = _START_S + WALL_TIMES * total_s + _SLACK_S
        max_line = 8 * (self.limits.output_kb << 10) + 8192  # JSON takes up to six bytes for one
        has_tests = any(case.test is not None for case in cases)

        with self._process(slot, limit_s, has_tests) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline(max_line) != b"ready\n":
                raise SandboxFault(f"it did not start: {_stderr(process)}")
            process.stdin.write(_line(self._job(source, cases, total_s)))
            process.stdin.flush()

            while len(results) < len(cases):
                line = process.stdout.readline(max_line)
                case = cases[len(results)]
                if not line:
                    status = process.wait()
                    if status != 0:
                        raise SandboxFault(f"it ended with status {status}: {_stderr(process)}")
                    break
                if line == b'"test"\n':
                    # In a thread: if the program has killed its reader, a full pipe blocks.
                    test = _line([len(results), case.test])
                    threading.Thread(target=_send, args=(process, test), daemon=True).start()
                    continue
                if not line.endswith(b"\n"):
                    raise SandboxFault("it wrote too much, or was ended while it wrote")
                result = case.verdict(json.loads(line))
                results.append(result)
                if stop_at_failure and result.status != "passed":
                    break

        return results + [CaseResult("skipped")] * (len(cases) - len(results))

    def _job(self, source: str, cases: Sequence[Case], total_s: float) -> Json:
        """Returns what the sandbox gets to do: no expected value, and no test before its turn."""
        compiled = threads_only_filter() if self.kind == "bubblewrap" else b""
        return {
            "source": source,
            "cases": [case.request for case in cases],
            "timeout_s": self.limits.timeout_s,
            "total_s": total_s,
            "memory_bytes": self.limits.memory_mb << 20,
            "output_bytes": self.limits.output_kb << 10,
            "threads": self._threads,
            "filter": base64.b64encode(compiled).decode(),
        }

    @contextmanager
    def _process(
        self, slot: int, limit_s: float, has_tests: bool
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Starts a sandbox and kills it after `limit_s`; on exit everything in it is dead and its
        pipes are closed.
        """
        process = self._start(slot, has_tests)
        timer = threading.Timer(limit_s, _kill, (process,))
        timer.daemon = True
        timer.start()
        with process:
            try:
                yield process
            finally:
                with suppress(OSError):
                    process.stdin.close()  # type: ignore[union-attr]  # ends the sandbox
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                timer.cancel()
                _kill(process)

    def _start(self, slot: int, has_tests: bool) -> subprocess.Popen[bytes]:
        user = None
        if self.kind == "bubblewrap" and os.geteuid() == 0:
            # The kernel counts processes per user and exempts root from the limit.
            user = _FIRST_UID + slot

        command = inside_command(self._python, has_tests)
        filter_fd, writer = os.pipe()
        with os.fdopen(filter_fd, "rb"):
            with os.fdopen(writer, "wb") as target:
                target.write(self._filter)  # fits into a pipe
            if self.kind == "bubblewrap":
                options = bwrap_options(self._python, self._variant, filter_fd)
                command = [self._bwrap, *options, *command]
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(filter_fd,),
                # Not this process's: programs may read /proc/1/environ.
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                cwd="/",
                process_group=0,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )

    def _select_working(self, candidates: Sequence[Interpreter]) -> None:
        """Selects the first interpreter and variant in which all probes pass. Raises
        ConfigError.
        """
        problems = []
        for python, variant in itertools.product(candidates, VARIANTS):
            self._python = python
            self._variant = variant
            try:
                results = self._run_in(0, PROBE_SOURCE, PROBE_CASES, stop_at_failure=False)
                named = zip(PROBES, results, strict=True)
                failed = [name for name, result in named if result.status != "passed"]
                if not failed:
                    return
                problems.append(f"{python.executable}: not contained: {', '.join(failed)}")
            except (SandboxFault, OSError, ValueError) as error:
                problems.append(f"{python.executable}: {error}")
        raise unavailable(
            f"the sandbox does not work on this machine: {problems[0]}; {problems[-1]}",
            "allow unprivileged user namespaces (kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns, the container's seccomp profile); "
            "name a Python that everyone can read as `python` of the reward function code; "
            "or, only for code that you trust, set its `sandbox` to none",
        )


def _counts_per_namespace() -> bool:
    """Whether the kernel counts a user's processes separately in every user namespace (since Linux
    5.14).
    """
    numbers = re.findall(r"\d+", os.uname().release)
    return [int(number) for number in numbers[:2]] >= [5, 14]


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _send(process: subprocess.Popen[bytes], test: bytes) -> None:
    """Sends a test into the sandbox; a program may have killed the process that should read it."""
    assert process.stdin is not None
    with suppress(OSError, ValueError):
        process.stdin.write(test)
        process.stdin.flush()


def _stderr(process: subprocess.Popen[bytes]) -> str:
    """Returns the beginning of the process's standard error."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    content = process.stderr.read(_STDERR_BYTES) or b""
    return content.decode("utf-8", "replace").strip() or "no message"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
