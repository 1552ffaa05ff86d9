"""An event loop beside the training loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from common import watchdog

_T = TypeVar("_T")
_LAST_TASKS_S = 10.0


class LoopThread:
    """An event loop in a thread of its own, for code that computes in the main thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="collector", daemon=True)

    def __enter__(self) -> "LoopThread":
        watchdog.follow(self.loop)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_end_all(), self.loop).result(_LAST_TASKS_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine in the loop and waits for its result; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Callable[[], _T]:
        """Runs a coroutine in the loop; the function returned waits for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts a task in the loop."""

        async def create() -> "asyncio.Task[None]":
            return asyncio.create_task(coroutine)

        return self.call(create())

    def cancel(self, task: "asyncio.Task[None]") -> None:
        """Cancels a task and waits until it has ended."""

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        self.call(end())


async def _end_all() -> None:
    """Cancels what is left and waits for it: a task that is destroyed with its loop says so, with a traceback."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
