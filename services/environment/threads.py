"""Threads for environment methods, which may hang: Python cannot end a thread, but another thread
can replace it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from services.environment.outcome import EnvironmentLost, told

log = logging.getLogger(__name__)
_WARN_EVERY_S = 60.0


@dataclass(eq=False)
class _Call:
    """A call, and the future of its caller."""

    function: Callable[[], Any]
    future: "asyncio.Future[Any]"
    is_left: bool = False
    """Whether the caller has stopped waiting."""
    is_over: bool = False


class Threads:
    """Runs calls in threads, at most `limit` at once; further calls wait.

    A call whose caller has given up keeps its thread until it ends, but frees its slot and counts
    as `hung`. At `limit` hung calls, no more calls are accepted. The threads end with the process,
    whatever they do.

    All counts belong to the event loop: the threads themselves only run calls.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hung = 0
        self._slots = asyncio.Semaphore(limit)
        self._idle_threads = 0
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._warned_at = -_WARN_EVERY_S

    @property
    def problem(self) -> str | None:
        """Why no more calls are accepted, or None."""
        if self.hung < self.limit:
            return None
        return (
            f"{self.hung} calls of the environment are stuck, the limit is {self.limit} "
            "(environment.workers): restart this server"
        )

    async def run(self, function: Callable[[], Any], name: str) -> Any:
        """Returns or raises what `function` does. Raises EnvironmentLost when too many calls
        hang.
        """
        async with self._slots:
            problem = self.problem
            if problem is not None:
                raise EnvironmentLost(problem)

            call = _Call(function, asyncio.get_running_loop().create_future())
            if self._idle_threads:
                self._idle_threads -= 1
            else:
                threading.Thread(target=self._work, name="environment", daemon=True).start()
            self._queue.put(call)

            try:
                return await call.future
            except asyncio.CancelledError:
                if not call.is_over:
                    call.is_left = True
                    self.hung += 1
                    self._warn(name)
                raise

    def close(self) -> None:
        """Ends the threads that do not hang."""
        for _ in range(self._idle_threads):
            self._queue.put(None)
        self._idle_threads = 0

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            result: Any = None
            error: Exception | None = None
            try:
                result = call.function()
            except StopIteration as stop:  # a future does not accept it
                error = RuntimeError(f"StopIteration: {stop}")
            except Exception as raised:
                error = raised
            except BaseException as ending:  # SystemExit would end the server
                error = RuntimeError(told(ending))
            with suppress(RuntimeError):  # the loop has ended
                call.future.get_loop().call_soon_threadsafe(self._finish, call, result, error)

    def _finish(self, call: _Call, result: Any, error: Exception | None) -> None:
        """Gives the result to the caller, in the event loop."""
        self._idle_threads += 1
        call.is_over = True
        if call.is_left:
            self.hung -= 1
        if call.future.cancelled():
            return
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _warn(self, name: str) -> None:
        now = time.monotonic()
        if now - self._warned_at < _WARN_EVERY_S and self.hung != self.limit:
            return
        self._warned_at = now
        log.warning(
            "%s is still running although its episode has ended: "
            "%d such calls hold their threads, the limit is %d",
            name,
            self.hung,
            self.limit,
        )
