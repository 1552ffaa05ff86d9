"""Threads that cannot delay the end of the process, nor report that it cut them off."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from common.errors import error_text

_T = TypeVar("_T")


def in_daemon_thread(function: Callable[[], _T], name: str) -> Future[_T]:
    """Calls `function` in a thread of its own; the future gets its result or error (`sent_on`)."""
    future = Future[_T]()

    def work() -> None:
        with suppress(InvalidStateError):  # the future was cancelled: nobody waits any more
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(sent_on(error))

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def sent_on(error: BaseException) -> Exception:
    """Returns an error of user code in a form that can be raised in another thread. A SystemExit
    would end the event loop there, which services may share, and a StopIteration cannot be set on a
    future: both become a RuntimeError.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    sent = RuntimeError(error_text(error))
    sent.__cause__ = error
    return sent


class DaemonThreads:
    """Calls a function with many arguments, in at most `limit` threads at once.

    Unlike those of a ThreadPoolExecutor, whose every accepted call Python waits for, they end with
    the process.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._name = name
        self._free = threading.Semaphore(limit)

    def map(self, function: Callable[..., _T], *columns: Iterable[Any]) -> list[_T]:
        """Returns the result for each row of `columns`. Raises the error of the first row that has
        one.
        """
        futures = [self._begin(function, row) for row in zip(*columns, strict=True)]
        return [future.result() for future in futures]

    def _begin(self, function: Callable[..., _T], row: tuple[Any, ...]) -> Future[_T]:
        self._free.acquire()
        try:
            wait_if_process_ends()
            future = in_daemon_thread(partial(function, *row), self._name)
        except RuntimeError:  # no thread is left
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return future


def process_ends() -> bool:
    """Returns whether the main thread has ended, so that daemon threads will be cut off at any
    time.
    """
    return not threading.main_thread().is_alive()


def wait_if_process_ends() -> None:
    """Waits forever in a daemon thread of a process that is ending, which would otherwise report
    that it was cut off.
    """
    if threading.current_thread().daemon and process_ends():
        threading.Event().wait()
