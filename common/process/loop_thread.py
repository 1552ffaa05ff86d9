"""An event loop in a thread of its own, next to code that computes or blocks."""

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from common.errors import ServiceError
from common.process import watchdog
from common.process.daemon_threads import process_ends, wait_if_process_ends
from common.process.futures import cancel
from common.process.main_thread import wait_for

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LIMIT_S = 10.0
_LOOK_S = 1.0


class LoopThread:
    """An event loop in a background thread.

    It ends on exit from the context, with `close`, or with the process, and cancels its tasks
    first.
    """

    def __init__(self, name: str = "collector") -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks = set[
            asyncio.Task[None]
        ]()  # a loop itself keeps only weak references to its tasks
        self._closing = threading.Lock()  # taken once and never released

    def __enter__(self) -> "LoopThread":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Starts the thread."""
        wait_if_process_ends()
        watchdog.follow(self.loop)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Cancels all tasks and ends the loop. Another call does nothing."""
        if not self._closing.acquire(blocking=False):
            return
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # the thread died and closed its loop
            self.loop.call_soon_threadsafe(self.loop.stop)

        # The garbage collector, which may run in any thread, closes the loops of objects that
        # nothing uses any more.
        if threading.current_thread() is not self._thread:
            self._thread.join(_LIMIT_S)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine in the loop and waits for its result; Ctrl-C cancels it."""
        return self.begin(coroutine)()

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Callable[[], _T]:
        """Starts a coroutine in the loop. Returns a function that waits for its result.

        It raises ServiceError when the thread of the loop has died.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            wait_if_process_ends()
            raise

        def wait() -> _T:
            try:
                while not wait_for(future, _LOOK_S):
                    if not self._thread.is_alive():
                        raise _died()
                return future.result()
            except futures.CancelledError:
                wait_if_process_ends()
                if not self._closing.locked():
                    raise _died() from None
                raise
            except BaseException:
                future.cancel()
                raise

        return wait

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds that the thread has used so far."""
        assert self._thread.ident is not None, "the thread runs"
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts a task in the loop."""

        async def create() -> "asyncio.Task[None]":
            task = asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task

        return self.call(create())

    def cancel(self, task: "asyncio.Task[None]") -> None:
        """Cancels a task and waits until it has ended."""
        self.call(cancel({task}))

    def _run(self) -> None:
        is_stopped = False
        while not is_stopped:
            try:
                self.loop.run_forever()  # until `close` stops it
                is_stopped = True
            except (SystemExit, KeyboardInterrupt):
                # asyncio also raises an exit of the interpreter here, besides in the tasks that
                # wait for it. They are told only if the loop goes on.
                log.exception("a task tried to end the interpreter")
        if process_ends():  # what is cut off now is no error, and nobody waits for its result
            self.loop.set_exception_handler(lambda loop, context: None)
        # asyncio logs a traceback for every task destroyed with its loop.
        self.loop.run_until_complete(cancel(asyncio.all_tasks(self.loop)))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def _died() -> ServiceError:
    return ServiceError(
        "the thread of the clients has died", code="clients_died", remedy="see the log above"
    )
