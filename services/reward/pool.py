"""Grader processes that can be killed: the only way to bound what sympy does with a hostile answer."""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

log = logging.getLogger(__name__)
Verdict = Literal["right", "wrong", "timeout", "died"]

_SCRIPT = Path(__file__).with_name("worker.py")
_START_S = 60.0  # loading math-verify takes a second; on a loaded machine much longer
_RETRY_S = 1.0
_END_S = 5.0
_ANSWERS_PER_WORKER = 2000  # then a fresh one: sympy's caches only grow


class GraderDied(Exception):
    """A grader process ended, or could not be started."""


class _Worker:
    """One grader process, seen from the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self.reader, self.writer, self.pid, self.graded = reader, writer, pid, 0

    async def grade(self, gold: str, answer: str) -> Verdict:
        self.writer.write(json.dumps([gold, answer]).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        self.graded += 1
        if line == b"right\n":
            return "right"
        if line == b"wrong\n":
            return "wrong"
        raise GraderDied

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.writer.close()


class GraderPool:
    """Compares answers in worker processes, one answer at a time each; an async context manager.

    A worker that is over its deadline is killed and replaced when it is next needed. Starting takes a moment:
    `problem` says why the pool cannot grade yet, and is None as soon as it can.

    Args:
        workers: processes.
        timeout_s: seconds one answer may take in a worker; waiting for a free worker does not count.
        memory_mb: address space of one worker.
        on_restart: called whenever a worker was killed, was found dead, or was replaced for its age.
    """

    def __init__(self, workers: int, timeout_s: float, memory_mb: int, on_restart: Callable[[], None] = lambda: None) -> None:
        self.size, self.timeout_s, self.memory_mb, self._on_restart = workers, timeout_s, memory_mb, on_restart
        self.problem: str | None = "the graders are starting"
        self.unfinished = 0
        """Answers in workers or waiting for one."""
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

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Whether the two are equivalent; `timeout` or `died` when that could not be found out.

        Cancelling the call frees the worker, if need be by killing it.
        """
        self.unfinished += 1
        try:
            worker = await self._idle.get()
            try:
                worker, verdict = await self._grade_in(worker, gold, answer)
            except BaseException:  # cancelled: what the worker computes nobody wants
                self._idle.put_nowait(None)
                raise
            self._idle.put_nowait(worker)
            return verdict
        finally:
            self.unfinished -= 1

    async def _grade_in(self, worker: _Worker | None, gold: str, answer: str) -> tuple[_Worker | None, Verdict]:
        if worker is not None and worker.reader.at_eof():  # it died while it was idle: not the fault of this answer
            worker.writer.close()
            self._on_restart()
            worker = None
        try:
            worker = worker or await self._spawn()
        except GraderDied as error:
            log.error("a grader did not start: %s", error)
            await asyncio.sleep(_RETRY_S)
            return None, "died"
        keep = False
        verdict: Verdict = "died"
        try:
            async with asyncio.timeout(self.timeout_s):
                verdict = await worker.grade(gold, answer)
            keep = worker.graded < _ANSWERS_PER_WORKER
        except TimeoutError:
            verdict = "timeout"
        except (GraderDied, OSError):
            verdict = "died"
        finally:
            if not keep:
                worker.kill()
                self._on_restart()
        return (worker if keep else None), verdict

    async def _fill(self) -> None:
        for _ in range(self.size):
            while True:
                try:
                    self._idle.put_nowait(await self._spawn())
                    break
                except GraderDied as error:
                    self.problem = f"the graders do not start: {error}"
                    log.error("%s", self.problem)
                    await asyncio.sleep(_RETRY_S)
        self.problem = None

    async def _spawn(self) -> _Worker:
        """A new worker, ready. Raises GraderDied."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._started(), [b"w"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise GraderDied(f"the process that forks graders is gone: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
            return _Worker(reader, writer, int(line))
        except (TimeoutError, ValueError, OSError):
            writer.close()
            raise GraderDied("the process that forks graders did not answer; see its messages above") from None
        except BaseException:
            writer.close()
            raise

    def _started(self) -> socket.socket:
        """The control socket of a running fork server; starts one if there is none."""
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        # By path, so that it works from any directory and whatever the main program is; -P: not its folder on sys.path.
        command = [sys.executable, "-P", str(_SCRIPT), str(self.memory_mb), str(math.ceil(self.timeout_s) + 1)]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0)
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
