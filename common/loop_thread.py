"""An event loop in a thread of its own, next to the training loop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

from common import watchdog
from common.errors import ServiceError

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LIMIT_S = 10.0
_LOOK_S = 1.0


class LoopThread:
    """An event loop in a background thread, for code that computes in the main thread. On exit it cancels its tasks."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def __enter__(self) -> "LoopThread":
        watchdog.follow(self.loop)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        async def end_all() -> None:  # asyncio logs a traceback for every task destroyed with its loop
            await _cancel({task for task in asyncio.all_tasks() if task is not asyncio.current_task()})

        if self._thread.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end_all(), self.loop).result(_LIMIT_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_LIMIT_S)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        """Runs the loop until it is stopped.

        asyncio also raises an exit of the interpreter here, besides in the tasks that wait for it. They are told only if the
        loop goes on.
        """
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                log.exception("a task tried to end the interpreter")

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine in the loop and waits for its result; Ctrl-C cancels it."""
        return self.begin(coroutine)()

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Callable[[], _T]:
        """Starts a coroutine in the loop. Returns a function that waits for its result.

        It raises ServiceError when the thread of the loop has died.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)

        def wait() -> _T:
            try:
                while not futures.wait((future,), _LOOK_S).done:
                    if not self._thread.is_alive():
                        raise ServiceError("the thread of the clients has died", remedy="see the log above")
                return future.result()
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
            return asyncio.create_task(coroutine)

        return self.call(create())

    def cancel(self, task: "asyncio.Task[None]") -> None:
        """Cancels a task and waits until it has ended."""
        self.call(_cancel({task}))


async def _cancel(tasks: "set[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
