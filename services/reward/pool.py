"""Worker processes that can be killed: the only way to limit the time of sympy or of a user's reward function."""

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
from typing import Any, Self

from common.schemas import RewardStatus
from common.security import TOKEN

log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("worker.py")
_START_S = 60.0  # loading math-verify takes a second; on a loaded machine much longer
_RETRY_S = 1.0
_END_S = 5.0
_ANSWERS_PER_WORKER = 2000  # then a fresh one: sympy's caches only grow
_MAX_LINE_BYTES = 256 << 20


class CallFailed(Exception):
    """A call of a reward function gave no scores; `status` is that of its answers. `always`: no completions would get any."""

    def __init__(self, status: RewardStatus, reason: str, always: bool = False) -> None:
        self.status, self.always = status, always
        super().__init__(reason)


@dataclass(frozen=True)
class WorkerSpec:
    """Code and limits of the workers of a pool."""

    module: str
    """Module whose `prepare(arguments)` runs once in the process that forks; its result makes the handler in a worker."""
    arguments: dict[str, Any]
    memory_mb: int | None = None
    """Address space of one worker; None: no limit."""
    answers: int | None = _ANSWERS_PER_WORKER
    """Answers after which a worker is replaced by a fresh one; None: never."""

    def command(self, *, check: bool = False) -> list[str]:
        """Returns the command line of the process that forks workers; with `check` it only makes one handler and exits."""
        spec = {"path": sys.path, "module": self.module, "arguments": self.arguments, "memory_mb": self.memory_mb}
        # By path, so that it works from any directory and with any main program; -P keeps its folder off sys.path.
        return [sys.executable, "-P", str(_SCRIPT), "check" if check else "serve", json.dumps(spec)]


@dataclass(eq=False)
class _Worker:
    """Connection of the server to one worker process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int
    answered: int = 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.writer.close()


class WorkerPool:
    """Worker processes that each answer one call at a time; an async context manager.

    A worker over its deadline is killed, and replaced when it is next needed. `problem` is the reason why the pool cannot work
    yet, and None once it can.

    Args:
        spec: code and limits of the workers.
        workers: number of processes.
        timeout_s: seconds for one call in a worker; waiting for a free worker does not count.
        on_restart: called whenever a worker was killed, was found dead, or was replaced for its age.
        start_s: seconds for a worker to start.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        workers: int,
        timeout_s: float,
        on_restart: Callable[[], None] = lambda: None,
        start_s: float = _START_S,
    ) -> None:
        self.spec, self.size, self.timeout_s, self.start_s, self._on_restart = spec, workers, timeout_s, start_s, on_restart
        self.problem: str | None = "the graders are starting"
        self.unfinished = 0
        """Calls in workers or waiting for one."""
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None: a place whose worker is gone
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._filling = asyncio.create_task(self._fill())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        while not self._idle.empty():
            if (worker := self._idle.get_nowait()) is not None:
                worker.kill()
        self.problem = "the graders have ended"
        await asyncio.to_thread(self._end_process)

    async def ready(self) -> None:
        """Returns when every worker has started for the first time."""
        assert self._filling is not None
        await asyncio.shield(self._filling)

    async def call(self, message: bytes) -> bytes:
        """Returns the answer of a worker to a line. Cancelling the call frees the worker by killing it.

        Raises CallFailed with the status `timeout` or `died`.
        """
        self.unfinished += 1
        try:
            idle, kept = await self._idle.get(), None
            try:
                worker = await self._alive(idle)
                try:
                    answer = await self._answer(worker, message)
                    kept = worker if self.spec.answers is None or worker.answered < self.spec.answers else None
                    return answer
                finally:
                    if kept is None:
                        worker.kill()
                        self._on_restart()
            finally:
                self._idle.put_nowait(kept)
        finally:
            self.unfinished -= 1

    async def _answer(self, worker: _Worker, message: bytes) -> bytes:
        try:
            async with asyncio.timeout(self.timeout_s):
                worker.writer.write(message + b"\n")
                await worker.writer.drain()
                line = await worker.reader.readuntil()
        except TimeoutError:
            raise CallFailed("timeout", f"no answer within {self.timeout_s} s") from None
        except (OSError, EOFError, asyncio.LimitOverrunError):
            raise CallFailed("died", "its worker died, or its answer is too long") from None
        worker.answered += 1
        return line[:-1]

    async def _alive(self, worker: _Worker | None) -> _Worker:
        """Returns an idle worker, or a new one where it has died. Raises CallFailed."""
        if worker is not None and worker.reader.at_eof():  # it died while idle: not the fault of this answer
            worker.writer.close()
            self._on_restart()
            worker = None
        try:
            return worker or await self._spawn()
        except CallFailed as error:
            log.error("a grader did not start: %s", error)
            await asyncio.sleep(_RETRY_S)
            raise

    async def _fill(self) -> None:
        for _ in range(self.size):
            while True:
                try:
                    self._idle.put_nowait(await self._spawn())
                    break
                except CallFailed as error:
                    self.problem = f"the graders do not start: {error}"
                    log.error("%s", self.problem)
                    await asyncio.sleep(_RETRY_S)
        self.problem = None

    async def _spawn(self) -> _Worker:
        """Starts a worker and waits until it is ready. Raises CallFailed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._started(), [b"w"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise CallFailed("died", f"the process that forks graders is gone: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE_BYTES)
        line = b""
        try:
            async with asyncio.timeout(self.start_s):
                line = await reader.readline()
            return _Worker(reader, writer, int(line))
        except (TimeoutError, ValueError, OSError):
            writer.close()
            reason = line.decode("utf-8", "replace").strip() or "the process that forks graders did not answer; see its log"
            raise CallFailed("died", reason) from None
        except BaseException:
            writer.close()
            raise

    def _started(self) -> socket.socket:
        """Returns the control socket of the fork server, and starts one unless it is running."""
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                self.spec.command(),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,
                env={name: value for name, value in os.environ.items() if name != TOKEN},  # workers process untrusted text
            )
        return self._control

    def _end_process(self) -> None:
        if self._process is None or self._control is None:
            return
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
