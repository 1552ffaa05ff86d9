"""Runs the calls of a service in one thread."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class OneThread:
    """Runs functions one after the other in a thread, so that they do not block the event loop."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs `function(*args, **kwargs)` in the thread. Once started it completes, even if its
        caller is cancelled.
        """
        run = contextvars.copy_context().run  # for the request id in its log lines
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: run(function, *args, **kwargs)
        )

    async def close(self) -> None:
        """Waits for the calls that were made, and stops the thread."""
        await asyncio.to_thread(self._thread.shutdown)
