"""Work that only the main thread can do, such as setting an alarm: it does it while it waits for a
loop.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

_T = TypeVar("_T")


class _MainThread:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.work = deque[Callable[[], None]]()
        self.has_waited = False
        """Whether it ever waits for a loop; that of a service runs the loop itself."""
        self.works = False


_main = _MainThread()


def wait_for(future: "Future[Any]", seconds: float) -> bool:
    """Waits for a result, at most for `seconds`, and returns whether it is there. The main thread
    does its work meanwhile.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _main.works:
        return bool(wait((future,), seconds).done)

    def notify(_: object) -> None:
        with _main.changed:
            _main.changed.notify_all()

    _main.has_waited = True
    future.add_done_callback(notify)
    with _main.changed:
        _main.changed.wait_for(lambda: future.done() or _main.work, seconds)
    while _main.work and not future.done():
        _main.works = True
        try:
            _main.work.popleft()()
        finally:
            _main.works = False
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
        except Exception as error:
            future.set_exception(error)
        except BaseException as ending:
            future.set_exception(RuntimeError(f"{type(ending).__name__}: {ending}"))
            if isinstance(ending, KeyboardInterrupt):
                raise

    with _main.changed:
        _main.work.append(work)
        _main.changed.notify_all()
    return future


def needs_main_thread(error: BaseException | None) -> bool:
    """Returns whether a function failed because it set a signal handler in another thread, and the
    main thread can call it.
    """
    while error is not None:
        if "signal only works in main thread" in str(error):
            return _main.has_waited
        error = error.__cause__ or error.__context__
    return False
