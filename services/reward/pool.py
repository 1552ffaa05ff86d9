"""Worker processes that can be killed: the only way to limit the time of sympy or of a user's
reward function.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common import Json
from common.errors import ServiceLost
from common.process.futures import forgettable
from common.process.progress import Progress, Stuck, bounded
from common.process.security import TOKEN
from common.process.work_meter import WorkMeter
from common.wire.schemas import RewardStatus
from services.reward.fair_slots import FairSlots
from services.sandbox.meter import WALL_TIMES, Meter

log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("worker.py")
_START_S = 60.0  # loading math-verify takes a second, but much longer on a busy machine
_RETRY_S = 1.0
# Failures in a row, before the first workers have started, after which nobody needs to wait for
# them.
_MAX_FAILED_STARTS = 5
_LOOK_S = 0.05
_ANSWERS_PER_WORKER = 2000  # then it is replaced, because sympy's caches only grow
_MAX_LINE_BYTES = 256 << 20


class CallFailed(Exception):
    """A call of a reward function gave no scores; its answers get `status`.

    `always`: it would fail for other completions too.
    """

    def __init__(self, status: RewardStatus, reason: str, always: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.always = always


class _NotBegun(CallFailed):
    """The worker died before it read the message, so this message did not cause it."""


@dataclass(frozen=True)
class WorkerSpec:
    """Code and limits of the workers of a pool."""

    module: str
    """Module whose `prepare(arguments)` runs once in the forking process; its result creates a
    worker's handler."""
    arguments: Json
    memory_mb: int | None = None
    """Address space of one worker; None: no limit."""
    answers: int | None = _ANSWERS_PER_WORKER
    """Answers after which a worker is replaced; None: never."""
    spares: int = 0
    """Additional idle workers, which replace killed ones at once."""

    def command(self, *, check: bool = False) -> list[str]:
        """Returns the command line of the forking process; with `check` it only creates one handler
        and exits.
        """
        spec = {
            "path": sys.path,
            "module": self.module,
            "arguments": self.arguments,
            "memory_mb": self.memory_mb,
        }
        # By path, so that it works from any directory and with any main program; -P keeps its
        # folder off sys.path.
        return [sys.executable, "-P", str(_SCRIPT), "check" if check else "serve", json.dumps(spec)]


@dataclass(eq=False)
class _Worker:
    """The server's connection to one worker process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int
    answered: int = 0
    began: bool = False
    """Whether the worker has read the last message."""

    async def exchange(self, message: bytes) -> bytes:
        """Sends a line and returns the answer. Raises OSError or EOFError when the process has
        died.
        """
        self.began = False
        self.writer.write(message + b"\n")
        await self.writer.drain()
        await self.reader.readexactly(1)
        self.began = True
        line = await self.reader.readuntil()
        self.answered += 1
        return line[:-1]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.writer.close()


class ForkServer:
    """The process that loads a module once and then forks workers; it starts with the first
    worker.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Id of the process, which `fork` has started."""
        assert self._process is not None
        return self._process.pid

    def fork(self, connection: socket.socket) -> None:
        """Forks a worker that answers on `connection`. Raises OSError when the forking process is
        gone.
        """
        socket.send_fds(self._started(), [b"w"], [connection.fileno()])

    def _started(self) -> socket.socket:
        """Returns the control socket of the process, after starting it unless it is running."""
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()

        env = dict(os.environ)
        env.pop(TOKEN, None)  # workers process untrusted text
        self._control, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                self.spec.command(),
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,
                env=env,
            )
        return self._control

    def end(self) -> None:
        """Kills the process and its workers, which have nothing to save and may still load their
        module for seconds.
        """
        if self._process is None or self._control is None:
            return
        self._control.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class WorkerPool:
    """Worker processes that each answer one call at a time; an async context manager.

    A worker over its deadline is killed, replaced by a spare one, and a new one is started.
    `problem` is the reason why the pool cannot work yet; None once it can.

    Args:
        spec: code and limits of the workers.
        workers: maximum concurrent calls.
        timeout_s: seconds per call in a worker, as counted by `Meter`: waiting for a worker or a
            processor does not count.
        on_restart: called whenever a worker was killed, was found dead, or was replaced for its
            age.
        start_s: seconds without progress (bytes read, memory) after which a worker that starts is
            given up. A reward model is downloaded and loaded first.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        workers: int,
        timeout_s: float,
        on_restart: Callable[[], None] = lambda: None,
        start_s: float = _START_S,
    ) -> None:
        self.spec = spec
        self.size = workers
        self.timeout_s = timeout_s
        self.start_s = start_s
        self._on_restart = on_restart
        self.problem: str | ServiceLost | None = "the graders are starting"
        self.unfinished = 0
        """Calls that are in a worker or waiting for one."""
        self._slots = FairSlots(workers)
        # Workers that wait for a call; in their place the error of starts that keep failing.
        self._idle: asyncio.Queue[_Worker | CallFailed] = asyncio.Queue()
        # Counts the workers to start: `_fill` takes one, a killed worker adds one.
        self._missing = asyncio.Semaphore(workers + spec.spares)
        self._started_once = asyncio.Event()
        self._server = ForkServer(spec)
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._filling = asyncio.create_task(self._fill())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        while not self._idle.empty():
            worker = self._idle.get_nowait()
            if isinstance(worker, _Worker):
                worker.kill()
        self.problem = "the graders have ended"
        self._server.end()  # not in a thread, which an ending process cannot start

    async def ready(self) -> None:
        """Waits until enough workers for all concurrent calls have started."""
        await self._started_once.wait()

    async def call(self, message: bytes, batch: object = None) -> bytes:
        """Sends a line to a worker and returns its answer. Cancelling the call kills the worker.

        The batches that wait share the workers fairly (`FairSlots`). Raises CallFailed with the
        status `timeout` or `died`.
        """
        self.unfinished += 1
        try:
            async with self._slots.slot(batch or object()):
                # As many workers may have died while idle.
                for _ in range(self.size + self.spec.spares):
                    with contextlib.suppress(_NotBegun):
                        return await self._try(message)
                return await self._try(message)
        finally:
            self.unfinished -= 1

    async def _try(self, message: bytes) -> bytes:
        """Returns the answer of an idle worker. Raises CallFailed, including when no worker can be
        started.
        """
        worker = await self._idle.get()
        if isinstance(worker, CallFailed):
            raise worker
        # A call that fails or is cancelled leaves a worker that may still be computing.
        is_spent = True
        try:
            answer = await self._answer(worker, message)
            is_spent = worker.answered == self.spec.answers
            return answer
        finally:
            if is_spent:
                worker.kill()
                self._missing.release()
                self._on_restart()
            else:
                self._idle.put_nowait(worker)

    async def _answer(self, worker: _Worker, message: bytes) -> bytes:
        """Returns the answer of a worker. Raises CallFailed."""
        meter = Meter(worker.pid)
        is_over = False
        wait_s = self.timeout_s
        exchange = forgettable(asyncio.create_task(worker.exchange(message)))
        try:
            while True:
                await asyncio.wait({exchange}, timeout=wait_s)
                if exchange.done():
                    return exchange.result()
                # The verdict is one look later: a worker that has answered is waiting, too.
                if is_over:
                    raise CallFailed("timeout", f"no answer within {self.timeout_s} s")
                used_s = meter.read()
                is_over = used_s >= self.timeout_s or meter.wall_s >= WALL_TIMES * self.timeout_s
                wait_s = _LOOK_S if is_over else max(_LOOK_S, self.timeout_s - used_s)
        except (OSError, EOFError, asyncio.LimitOverrunError):
            kind = CallFailed if worker.began else _NotBegun
            raise kind("died", "its worker died, or its answer is too long") from None
        finally:
            exchange.cancel()

    async def _fill(self) -> None:
        """Starts the missing workers."""
        started = 0
        failed = 0  # starts in a row
        while True:
            await self._missing.acquire()
            try:
                self._idle.put_nowait(await self._spawn())
                started += 1
                failed = 0
            except CallFailed as error:
                log.error("a grader did not start: %s", error)
                self._missing.release()
                failed += 1
                self._report_failure(error, failed)
                await asyncio.sleep(_RETRY_S)
            if started >= self.size:
                self.problem = None
                self._started_once.set()

    def _report_failure(self, error: CallFailed, failed: int) -> None:
        """Records that `failed` starts in a row have failed, and fails a call that might otherwise
        wait forever.
        """
        is_hopeless = failed > 1  # the first failure may have been a kill
        if not self._started_once.is_set():
            is_hopeless = failed >= _MAX_FAILED_STARTS
            self.problem = f"the graders do not start: {error}"
            if is_hopeless:
                self.problem = ServiceLost(
                    f"the graders did not start {failed} times in a row: {error}",
                    remedy="the output of the forking process, on standard error, says more",
                )
        if is_hopeless and self._idle.empty() and self.unfinished:
            self._idle.put_nowait(error)

    async def _spawn(self) -> _Worker:
        """Starts a worker and waits until it is ready. Raises CallFailed."""
        line = b""
        with contextlib.ExitStack() as opened:  # is closed unless the worker has started
            try:
                pool_end, worker_end = map(opened.enter_context, socket.socketpair())
                self._server.fork(worker_end)
                worker_end.close()
                reader, writer = await asyncio.open_unix_connection(
                    sock=pool_end, limit=_MAX_LINE_BYTES
                )
                opened.callback(writer.close)
                waits = Progress("a grader to start", self.start_s)
                meter = WorkMeter(self._server.pid)
                line = await bounded(reader.readline(), waits, meter.read)
                worker = _Worker(reader, writer, int(line))
                opened.pop_all()
                return worker
            except (Stuck, ValueError, OSError) as error:
                reason = line.decode("utf-8", "replace").strip()
                silent = f"no grader can be started; see the log of the process that does: {error}"
                raise CallFailed("died", reason or silent) from None
