"""Supervises a child process: starts it, probes it, kills it when it hangs or a start gets stuck,
and starts it again.

    engine = SupervisedProcess("engine", launch, probe, env={}, log_file=log, timing=Timing())
    await engine.run()    # until cancelled, or until it has failed several times in a row
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, ServiceError
from common.process.child import Child, ChildOutput
from common.process.exits import SIGNALLED, how_ended
from common.process.progress import Progress
from common.process.topology import WRONG_SETTING
from common.process.work_meter import News, WorkMeter
from services.rollout.console import Console

log = logging.getLogger(__name__)
_STOP_S = 10.0
# Errors of the child's own in a row that are fatal: it ended by itself before it was stable.
_MAX_CRASHES = 5
# Longest probe (`Client.unhealthy_reason`).
_PROBE_S = 5.0


class ChildFailed(ServiceError):
    """A child process failed several times in a row: at its start, or soon after it with an error
    of its own. Its code names the child: `engine_failed`.
    """


@dataclass(frozen=True)
class Timing:
    """Timing of a supervision, in seconds."""

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


class SupervisedProcess:
    """A supervised child, restarted with growing pauses.

    `launch` returns the command before every start; `probe` returns why the child is unhealthy, or
    None. A start may take as long as the child makes progress (`work`); `stuck_field` names the
    setting that limits its standstill. An error in `on_up` counts as a failed start; `on_down` gets
    the reason for the end. The output goes to `log_file`, and if `shown` to stderr. A child that a
    signal ended, or that hung, is started again however often that happens.
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
        on_up: Callable[[], Awaitable[None]] | None = None,
        on_down: Callable[[str], None] = lambda _: None,
        shown: bool = True,
        stuck_field: str | None = None,
    ) -> None:
        self.name = name
        self._launch = launch
        self._probe = probe
        self._env = env
        self._log_file = log_file
        self._timing = timing
        self._on_up = on_up
        self._on_down = on_down
        self._show = Console(name, log_file).show if shown else lambda _: None
        self._stuck_field = stuck_field
        self.up = False
        self.starts = 0
        self.pid: int | None = None
        """Id of the child's process group while it runs."""
        self._news = News()
        self._meter: WorkMeter | None = None
        # Ends in a row, whatever their reason; they lengthen the pause before the next start.
        self._ends = 0
        self._failed_starts = 0
        self._own_crashes = 0
        self._up_since = 0.0
        # Exit status of the last child, if it ended by itself.
        self._status: int | None = None
        self._restart_reason: str | None = None

    def work(self) -> int:
        """Returns a number that grows as long as the running child and its children load something
        or have something new to say; 0 when there is none.
        """
        return 0 if self._meter is None else self._meter.read() + self._news.count

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
            output = ChildOutput(
                self._log_file,
                self._show,
                on_data=lambda data: self._news.feed(data.decode("utf-8", "replace")),
                on_loss=log.error,
                redacted=True,  # SGLang logs its arguments, including the key
            )
            reason = await self._run_once(output)
            log.error("%s: %s", self.name, reason)
            last_lines = [line.decode("utf-8", "replace") for line in output.last_lines]
            if self._status == WRONG_SETTING:
                said = last_lines[-1].removeprefix("error: ") if last_lines else "it says no reason"
                raise ConfigError(
                    f"{self.name} rejects its settings: {said}", remedy=f"see {self._log_file}"
                )

            failures = ""
            if self._failed_starts >= self._timing.max_failed_starts:
                failures = f"failed to start {self._failed_starts} times"
            elif self._own_crashes >= _MAX_CRASHES:
                failures = f"crashed {self._own_crashes} times"
            if failures:
                end_of_output = "\n".join(last_lines)
                raise ChildFailed(
                    f"{self.name} {failures} in a row, most recently: {reason}\n"
                    f"the end of its output:\n{end_of_output}",
                    remedy=f"see {self._log_file}",
                    code=f"{self.name}_failed",
                )

            backoff_s = self._timing.first_backoff_s * 2 ** max(0, self._ends - 1)
            await asyncio.sleep(min(self._timing.max_backoff_s, backoff_s))

    async def _run_once(self, output: ChildOutput) -> str:
        """Runs the child once. Returns why it ended."""
        self._restart_reason = None
        self._status = None
        self.starts += 1
        grace_s = 0.0
        child: Child | None = None
        try:
            command = await self._launch()
            log.info("starting %s: %s", self.name, " ".join(command))
            child = await Child.start(command, output, env={**os.environ, **self._env})
            self.pid = child.pid
            self._news = News()
            self._meter = WorkMeter(child.pid)
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
            self._meter = None
            if child is not None:
                await child.end(grace_s)

        # Loading a large model may take longer than it takes to be stable.
        stable = was_up and time.monotonic() - self._up_since > self._timing.stable_s
        self._ends = 1 if stable else self._ends + 1
        self._failed_starts = 0 if was_up else self._failed_starts + 1
        # A signal comes from outside (memory, a person): it is no error of the child's own.
        ended_itself = self._status is not None and 0 < self._status < SIGNALLED
        self._own_crashes = self._own_crashes + 1 if ended_itself and not stable else 0
        self._on_down(reason)
        return reason

    async def _watch(self, child: Child) -> str:
        """Probes the child until it must be restarted, and returns why."""
        ended = asyncio.create_task(child.wait())
        before = time.monotonic()
        looked = before
        unhealthy_s = 0.0
        start = Progress(
            f"the start of {self.name}",
            self._timing.stuck_s,
            unit="steps",
            field=self._stuck_field,
            remedy=f"see {self._log_file}",
        )
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
                # about the child: it counts as one slow probe.
                unhealthy_s += min(now - before, 2 * self._timing.probe_s + _PROBE_S)
                before = now

                if problem is None:
                    unhealthy_s = 0.0
                    if not self.up and not ended.done():
                        if self._on_up is not None:
                            await self._on_up()
                        self.up = True
                        self._up_since = time.monotonic()
                elif self.up and unhealthy_s > self._timing.hang_s:
                    return f"not healthy for {unhealthy_s:.0f} s, killed: {problem}"
                elif not self.up and now - looked >= start.pause_s:
                    looked = now
                    start.saw(self.work(), problem)
                    if start.is_stuck:
                        return f"killed: {start.error()}"
        finally:
            ended.cancel()
