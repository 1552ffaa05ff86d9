"""Supervised child processes. Each is a process group, logs to a file and to stderr, and ends with
this process.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.errors import ConfigError, ServiceError
from common.process import child
from common.process.exits import SIGNALLED, how_ended
from common.process.logs import structured
from common.process.progress import Progress
from common.process.security import SecretRedactor
from common.process.topology import WRONG_SETTING
from common.process.work_meter import News, WorkMeter
from services.rollout.repeats import Repeats

log = logging.getLogger(__name__)
_TAIL_BYTES = 4000
_STOP_S = 10.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROBE_S = 5.0
"""Longest probe (`Client.unhealthy_reason`)."""
_READ_BYTES = 65536
"""Output read at once, and the longest line that is shown whole."""


class ChildFailed(ServiceError):
    """A child process failed several times in a row: at its start, or soon after it with an error
    of its own. Its code names the child: `engine_failed`.
    """


class Child:
    """A running process group, made by `start`; a task copies its output."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, log_file: Path, shown: bool
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._shown = shown
        self._repeats = Repeats(log_file)
        self._tail = b""
        self._log = log_file.open("ab")
        self._log_failed = False
        self._news = News()
        self._meter = WorkMeter(process.pid)
        self._pump = asyncio.create_task(self._copy_output())

    @classmethod
    async def start(
        cls, name: str, words: list[str], env: Mapping[str, str], log_file: Path, shown: bool = True
    ) -> Self:
        """Starts `words` with `env` added to the environment; its output is appended to `log_file`,
        and `shown` on stderr.
        """
        log_file.parent.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *child.command(words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        return cls(name, process, log_file, shown)

    async def _copy_output(self) -> None:
        assert self._process.stdout is not None
        redactor = SecretRedactor()  # SGLang logs its arguments, including the key
        rest = b""
        ended = False
        while not ended:
            data = await self._process.stdout.read(_READ_BYTES)
            ended = not data
            chunk = redactor.feed(data) if data else redactor.end()
            self._append(chunk)
            self._news.feed(chunk.decode("utf-8", "replace"))
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _READ_BYTES:
                lines.append(rest)
                rest = b""
            if lines and self._shown:
                self._show(lines)

    def _show(self, lines: list[bytes]) -> None:
        """Prints lines of output on stderr, if it is open: the log file has everything."""
        now = time.monotonic()
        plain = [_COLOURS.sub("", line.decode("utf-8", "replace")) for line in lines]
        chosen = [self._repeats.shown(line, now) for line in plain]
        shown = [self._formatted(line) for line in chosen if line is not None]
        if shown:
            with contextlib.suppress(OSError):
                print("\n".join(shown), file=sys.stderr, flush=True)

    def _formatted(self, line: str) -> str:
        """Formats a line of output like this process's log; JSON lines are unchanged."""
        formatter = structured()
        if formatter is None:
            return f"{self.name} | {line}"
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                return line
        return formatter.line(self.name, line)

    def _append(self, chunk: bytes) -> None:
        """Writes to the log file. A full disk must not stop the reading, or the child would block
        on its output.
        """
        try:
            self._log.write(chunk)
            self._log.flush()
        except OSError as error:
            if not self._log_failed:
                log.error(
                    "the output of %s is no longer written to its log file: %s", self.name, error
                )
            self._log_failed = True

    async def wait(self) -> int:
        """Waits for the command and returns its exit status, 128 + n when signal n ended it.

        It polls, because asyncio's own `wait` may block until the last grandchild has closed the
        output.
        """
        while (status := self._process.returncode) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return status if status >= 0 else 128 - status

    def work(self) -> int:
        """Returns a number that grows as long as the command and its children load something or
        have something new to say.
        """
        return self._meter.read() + self._news.count

    def tail(self) -> str:
        """Returns the last few thousand characters of the output."""
        return self._tail.decode("utf-8", "replace")

    async def end(self, grace_s: float) -> None:
        """Ends the group: sends SIGTERM to the command, and SIGKILL to what is left after `grace_s`
        seconds.
        """
        if grace_s > 0 and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace_s)
        # macOS raises PermissionError when only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()
        # A process that left the group may still hold the pipe.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pump, 2)
        with contextlib.suppress(OSError):
            self._log.close()


@dataclass(frozen=True)
class Timing:
    """Timing of a child's supervision, in seconds."""

    probe_s: float = 1.0
    hang_s: float = 30.0
    """A child that was healthy is restarted after being unhealthy for this long."""
    stuck_s: float = 60.0
    """A child that starts is restarted when it has made no progress for this long."""
    stable_s: float = 60.0
    """After this long in good health, the next crash counts as the first again."""
    max_backoff_s: float = 30.0
    first_backoff_s: float = 0.5
    max_failed_starts: int = 5
    """Failed starts in a row that are fatal."""
    max_crashes: int = 5
    """Errors of the child's own in a row that are fatal: it ended by itself before it was
    stable."""


class Supervised:
    """A supervised child: started, probed, killed when it hangs, and restarted with growing pauses.

    `launch` returns the command before every start; `probe` returns why the child is unhealthy, or
    None. A start may take as long as the child makes progress (`Child.work`); `stuck_field` names
    the setting that limits its standstill. An error in `on_up` counts as a failed start; `on_down`
    gets the reason for the end. If `shown`, the output also goes to stderr. A child that a signal
    ended, or that hung, is started again however often that happens.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Awaitable[list[str]]],
        probe: Callable[[], Awaitable[str | None]],
        *,
        env: Mapping[str, str],
        log_file: Path,
        timing: Timing,
        on_up: Callable[[], Awaitable[None]],
        on_down: Callable[[str], None],
        shown: bool = True,
        stuck_field: str | None = None,
    ) -> None:
        self.name = name
        self._stuck_field = stuck_field
        self._child: Child | None = None
        self._launch = launch
        self._probe = probe
        self._env = env
        self._log_file = log_file
        self._timing = timing
        self._shown = shown
        self._on_up = on_up
        self._on_down = on_down
        self.up = False
        self.starts = 0
        self.pid: int | None = None
        self._crashes = 0
        """Ends in a row, whatever their reason; they lengthen the pause before the next start."""
        self._failed_starts = 0
        self._own_crashes = 0
        self._up_since = 0.0
        self._status: int | None = None
        self._restart_reason: str | None = None

    def work(self) -> int:
        """Returns `Child.work` of the running child; 0 when there is none."""
        return 0 if self._child is None else self._child.work()

    def restart(self, reason: str) -> None:
        """Has the child killed and started again soon."""
        self._restart_reason = reason

    async def run(self) -> None:
        """Keeps the child running until cancelled; then sends SIGTERM, and SIGKILL after 10
        seconds.

        Raises ChildFailed, with the end of the output, after several failures in a row, and
        ConfigError at once when the child ends with `WRONG_SETTING`.
        """
        while True:
            tail, reason = await self._run_once()
            log.error("%s: %s", self.name, reason)
            if self._status == WRONG_SETTING:
                last_line = tail.strip().rpartition("\n")[2].removeprefix("error: ")
                raise ConfigError(
                    f"{self.name} rejects its settings: {last_line}", remedy=f"see {self._log_file}"
                )

            failures = ""
            if self._failed_starts >= self._timing.max_failed_starts:
                failures = f"failed to start {self._failed_starts} times"
            elif self._own_crashes >= self._timing.max_crashes:
                failures = f"crashed {self._own_crashes} times"
            if failures:
                raise ChildFailed(
                    f"{self.name} {failures} in a row, most recently: {reason}\n"
                    f"the end of its output:\n{tail}",
                    remedy=f"see {self._log_file}",
                    code=f"{self.name}_failed",
                )

            backoff_s = self._timing.first_backoff_s * 2 ** max(0, self._crashes - 1)
            await asyncio.sleep(min(self._timing.max_backoff_s, backoff_s))

    async def _run_once(self) -> tuple[str, str]:
        """Runs the child once. Returns the end of its output and why it ended."""
        self._restart_reason = None
        self._status = None
        self.starts += 1
        grace_s = 0.0
        tail = ""
        child: Child | None = None
        try:
            command = await self._launch()
            log.info("starting %s: %s", self.name, " ".join(command))
            child = await Child.start(
                self.name, command, self._env, log_file=self._log_file, shown=self._shown
            )
            self.pid = child.pid
            self._child = child
            reason = await self._watch(child)
        except asyncio.CancelledError:
            grace_s = _STOP_S
            raise
        except (ServiceError, OSError) as error:
            reason = str(error)
        finally:
            was_up = self.up
            self.up = False
            self.pid = None
            self._child = None
            if child is not None:
                await child.end(grace_s)
                tail = child.tail()

        # Loading a large model may take longer than it takes to be stable.
        stable = was_up and time.monotonic() - self._up_since > self._timing.stable_s
        self._crashes = 1 if stable else self._crashes + 1
        self._failed_starts = 0 if was_up else self._failed_starts + 1
        ended_itself = self._status is not None and 0 < self._status < SIGNALLED
        self._own_crashes = self._own_crashes + 1 if ended_itself and not stable else 0
        self._on_down(reason)
        return tail, reason

    async def _watch(self, child: Child) -> str:
        """Probes the child until it must be restarted, and returns why."""
        ended = asyncio.create_task(child.wait())
        before = time.monotonic()
        unhealthy_s = 0.0
        start = Progress(
            f"the start of {self.name}",
            self._timing.stuck_s,
            unit="steps",
            field=self._stuck_field,
            remedy=f"see {self._log_file}",
        )
        looked = before
        try:
            while True:
                pause_s = self._timing.probe_s if self.up else min(0.1, self._timing.probe_s)
                await asyncio.wait({ended}, timeout=pause_s)
                if ended.done():
                    self._status = ended.result()
                    return f"the process {how_ended(self._status)}"
                if self._restart_reason is not None:
                    return self._restart_reason

                problem = await self._probe()
                now = time.monotonic()
                # If a round took longer, this process was stopped or starved, which says nothing
                # about the child.
                unhealthy_s += min(now - before, 2 * self._timing.probe_s + _PROBE_S)
                before = now

                if problem is None:
                    unhealthy_s = 0.0
                    if not self.up and not ended.done():
                        await self._on_up()
                        self.up = True
                        self._up_since = time.monotonic()
                elif self.up and unhealthy_s > self._timing.hang_s:
                    return f"not healthy for {unhealthy_s:.0f} s, killed: {problem}"
                elif not self.up and now - looked >= start.pause_s:
                    looked = now
                    start.saw(child.work(), problem)
                    if start.is_stuck:
                        return f"killed: {start.error()}"
        finally:
            ended.cancel()
