"""Runs programs against their test cases, each in its own sandbox, in parallel slots."""

import base64
import json
import logging
import os
import queue
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from services.reward.sandbox.cases import Case, CaseResult
from services.reward.sandbox.command import (
    VARIANTS,
    Python,
    Variant,
    bwrap_command,
    counts_per_namespace,
    find_bwrap,
    inside_command,
    interpreters,
    slot_user,
    unavailable,
)
from services.reward.sandbox.filters import base_filter, threads_only_filter
from services.reward.sandbox.selftest import PROBE_CASES, PROBE_SOURCE, PROBES

log = logging.getLogger(__name__)
SandboxKind = Literal["bubblewrap", "none"]

_TRIES = 3
_START_S = 20.0
_SLACK_S = 5.0
_END_S = 10.0
_TOTAL_TIMEOUTS = 5
"""Time for all cases of a program, as a multiple of the time-out of one."""
_THREADS = 64
_STDERR_BYTES = 4096


class SandboxFault(Exception):
    """The sandbox itself failed, not the program."""


@dataclass(frozen=True)
class Limits:
    """Resources of one program."""

    timeout_s: float
    """Wall time of one case; all cases of a program share five times as much."""
    memory_mb: int
    """Address space; a program has one process."""
    output_kb: int = 64
    """Standard output of one case, and size of the value that it returns."""


class Sandbox:
    """Slots in which programs run. Thread-safe.

    Args:
        limits: resources of every program.
        slots: programs at once.
        kind: `none` runs programs as this user with no protection but the limits.
        python: the interpreter for programs; when empty, one is found.

    Raises:
        ConfigError: the sandbox, which is tested with programs that attempt to break out, does not work here.
    """

    def __init__(self, limits: Limits, slots: int, kind: SandboxKind = "bubblewrap", python: str = "") -> None:
        self.limits, self.kind = limits, kind
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._slots.put(slot)
        self._filter, self._bwrap, self._variant = b"", "", VARIANTS[0]
        self._threads = _THREADS if kind == "bubblewrap" and (os.geteuid() == 0 or counts_per_namespace()) else None
        if kind == "none":
            self._python = interpreters(python)[0]
            log.warning("programs run WITHOUT a sandbox, as this user: reward.code_sandbox is none")
        else:
            self._filter = base_filter()
            self._bwrap = find_bwrap()
            self._python, self._variant = self._tested(interpreters(python))
            log.info("programs run in bubblewrap with %s, %s", self._python.executable, self._variant)

    def run(self, source: str, cases: Sequence[Case], *, stop_at_failure: bool = False) -> list[CaseResult]:
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
                return self._run_in(slot, source, cases, stop_at_failure)
            except (SandboxFault, OSError) as error:
                log.warning("the sandbox failed: %s", error)
                fault = error
            finally:
                self._slots.put(slot)
            time.sleep(0.1 * 2**attempt)
        raise SandboxFault(str(fault))

    def _run_in(self, slot: int, source: str, cases: Sequence[Case], stop_at_failure: bool) -> list[CaseResult]:
        results: list[CaseResult] = []
        total = min(_TOTAL_TIMEOUTS, len(cases)) * self.limits.timeout_s
        with self._process(slot, self._python, self._variant) as process:
            longest = 8 * (self.limits.output_kb << 10) + 8192  # JSON takes up to six bytes for one
            lines = _Lines(process, longest, time.monotonic() + _START_S)
            if lines.next() != b"ready":
                raise SandboxFault(f"it did not start: {_stderr(process)}")
            lines.deadline = time.monotonic() + _START_S + total + _SLACK_S
            lines.send(self._job(source, cases, total))
            line: bytes | None = b""
            while len(results) < len(cases):
                line = lines.next()
                if line is None:
                    break
                results.append(cases[len(results)].verdict(json.loads(line)))
                if stop_at_failure and results[-1].status != "passed":
                    break
            if line is None and lines.late:
                raise SandboxFault(f"it did not end in time: {_stderr(process)}")
            if line is None and (status := _exit_status(process)) != 0:
                raise SandboxFault(f"it ended with status {status}: {_stderr(process)}")
        return results + [CaseResult("skipped")] * (len(cases) - len(results))

    def _job(self, source: str, cases: Sequence[Case], total_s: float) -> bytes:
        job = {
            "source": source,
            "cases": [case.request for case in cases],
            "timeout_s": self.limits.timeout_s,
            "total_s": total_s,
            "memory_bytes": self.limits.memory_mb << 20,
            "output_bytes": self.limits.output_kb << 10,
            "threads": self._threads,
            "filter": base64.b64encode(threads_only_filter()).decode() if self.kind == "bubblewrap" else "",
        }
        return json.dumps(job).encode() + b"\n"

    @contextmanager
    def _process(self, slot: int, python: Python, variant: Variant) -> Iterator[subprocess.Popen[bytes]]:
        """Starts a sandbox; at the end everything in it is dead and its pipes are closed."""
        with _readable(self._filter) as filter_fd:
            inside = self.kind == "none"
            command = inside_command(python) if inside else bwrap_command(self._bwrap, python, variant, filter_fd)
            user = None if inside else slot_user(slot)
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=() if inside else (filter_fd,),
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},  # not this process's: programs may read /proc/1/environ
                cwd="/",
                process_group=0,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        try:
            yield process
        finally:
            _end(process)

    def _tested(self, candidates: Sequence[Python]) -> tuple[Python, Variant]:
        """Returns the first interpreter and variant in which all probes pass. Raises ConfigError."""
        problems = []
        for python in candidates:
            for variant in VARIANTS:
                problem = self._problem(python, variant)
                if problem is None:
                    return python, variant
                problems.append(f"{python.executable}: {problem}")
        raise unavailable(
            f"the sandbox does not work on this machine: {problems[0]}; {problems[-1]}",
            "allow unprivileged user namespaces (kernel.unprivileged_userns_clone, kernel.apparmor_restrict_"
            "unprivileged_userns, the container's seccomp profile); name a Python that everyone can read with "
            "reward.code_python; or, only for code that you trust, set reward.code_sandbox none",
        )

    def _problem(self, python: Python, variant: Variant) -> str | None:
        self._python, self._variant = python, variant
        try:
            results = self._run_in(0, PROBE_SOURCE, PROBE_CASES, False)
        except (SandboxFault, OSError, ValueError) as error:
            return str(error)
        failed = [name for name, result in zip(PROBES, results, strict=True) if result.status != "passed"]
        return f"not contained: {', '.join(failed)}" if failed else None


class _Lines:
    """Lines of a sandbox's output, until a deadline. `late` distinguishes the deadline from the end."""

    def __init__(self, process: subprocess.Popen[bytes], limit: int, deadline: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._into, self._out, self._limit = process.stdin.fileno(), process.stdout.fileno(), limit
        self._rest = bytearray()
        self.deadline, self.late = deadline, False
        os.set_blocking(self._into, False)

    def send(self, content: bytes) -> None:
        """Writes to the sandbox. Raises SandboxFault when it does not read."""
        left = memoryview(content)
        while left:
            if not self._wait(self._into, select.POLLOUT):
                raise SandboxFault("it does not read its job")
            try:
                left = left[os.write(self._into, left[: 1 << 16]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise SandboxFault("it ended before it read its job") from None

    def next(self) -> bytes | None:
        """Returns the next line, or None at the end. Raises SandboxFault for a line over the limit."""
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > self._limit:
                raise SandboxFault("it wrote too much")
            if not self._wait(self._out, select.POLLIN):
                self.late = True
                return None
            data = os.read(self._out, 1 << 16)
            if not data:
                return None
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    def _wait(self, fd: int, event: int) -> bool:
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(max(0.0, self.deadline - time.monotonic()) * 1000))


@contextmanager
def _readable(content: bytes) -> Iterator[int]:
    """Opens a descriptor from which `content` (less than a pipe holds) can be read once."""
    reader, writer = os.pipe()
    try:
        os.write(writer, content)
    finally:
        os.close(writer)
    try:
        yield reader
    finally:
        os.close(reader)


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return -1


def _stderr(process: subprocess.Popen[bytes]) -> str:
    """Returns the beginning of its standard error."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    with suppress(OSError):
        return (process.stderr.read(_STDERR_BYTES) or b"").decode("utf-8", "replace").strip() or "no message"
    return "no message"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a sandbox by closing its standard input, and kills it when it does not end."""
    pipes = [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]
    with suppress(OSError):
        pipes[0].close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in pipes[1:]:
        pipe.close()
