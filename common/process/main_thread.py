"""Work that only the main thread can do, such as setting an alarm: it does it while it waits for a
loop.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from common.process.daemon_threads import sent_on

_T = TypeVar("_T")
_work = SimpleQueue[Callable[[], None]]()
# Whether the main thread has ever waited for a loop. In a service it never does: it runs the loop
# itself.
_has_waited = False
_works = False


def wait_for(future: "Future[Any]", seconds: float) -> bool:
    """Waits for a result, at most for `seconds`, and returns whether it is there. The main thread
    does its work meanwhile.
    """
    global _has_waited, _works
    is_main = threading.current_thread() is threading.main_thread()
    # Work that itself waits for a loop must not begin further work inside of it.
    if not is_main or _works:
        return bool(wait((future,), seconds).done)

    _has_waited = True
    future.add_done_callback(lambda _: _work.put(lambda: None))  # it ends the wait below
    while not future.done():
        try:
            work = _work.get(timeout=seconds)
        except Empty:
            break
        _works = True
        try:
            work()
        finally:
            _works = False
    return future.done()


def in_main_thread(function: Callable[[], _T]) -> "Future[_T]":
    """Returns the future result of a function that the main thread calls. Ctrl-C during the call
    ends the wait of the main thread too.
    """
    future: Future[_T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(sent_on(error))
            if isinstance(error, KeyboardInterrupt):
                raise

    _work.put(work)
    return future


def needs_main_thread(error: BaseException | None) -> bool:
    """Returns whether a function failed because it set a signal handler in another thread, and the
    main thread can call it.
    """
    while error is not None:
        if "signal only works in main thread" in str(error):
            return _has_waited
        error = error.__cause__ or error.__context__
    return False
