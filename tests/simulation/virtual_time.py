"""An event loop whose clock is virtual: nothing waits, and every run with one seed is the same."""

import asyncio
import collections
import concurrent.futures
import contextvars
import dataclasses
import functools
import gc
import heapq
import itertools
import random
import secrets
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

import anyio.to_thread
import fastapi.routing
from fastapi.dependencies import models

_EPOCH_S = 1.7e9
_THREAD_S = 0.002
"""Longest time until a thread runs what it was given."""
_populate = fastapi.routing._populate_api_route_state
_routes: dict[tuple[str, CodeType], dict[str, Any]] = {}


def _populated(route: Any, path: str, endpoint: Any, **options: Any) -> None:
    """Fills a route with what FastAPI finds out about its endpoint. A service that starts again has
    the same routes, which take half the time of a simulated run.
    """
    key = path, endpoint.__code__
    if key not in _routes:
        _populate(route, path, endpoint, **options)
        _routes[key] = dict(vars(route))
    known = _routes[key]
    vars(route).update(known)
    route.endpoint = endpoint
    route.dependant = dataclasses.replace(known["dependant"], call=endpoint)


def _by_code(classify: Any) -> Callable[[Any], bool]:
    """Returns what FastAPI finds out about a function, such as whether it is a coroutine's, once for
    each source: every start of a service has functions of its own.
    """
    known: dict[CodeType, bool] = {}

    def found(identity: Any) -> bool:
        function = identity.call
        if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
            return bool(classify(identity))
        if function.__code__ not in known:
            known[function.__code__] = classify(identity)
        return known[function.__code__]

    return found


_KINDS: dict[str, Any] = {
    name: _by_code(getattr(models, name))
    for name in (
        "_is_coroutine_callable_cached",
        "_is_gen_callable_cached",
        "_is_async_gen_callable_cached",
    )
}
process: ContextVar[str] = ContextVar("process", default="")
"""The simulated process to which the code that runs belongs; "" is the trainer's."""


class Deadlock(Exception):
    """Everything waits for something that will never happen."""


class _NoSockets(selectors.BaseSelector):
    """A selector without sockets."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Any:
        return self._keys

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class _Handle(asyncio.Handle):
    """A call that is scheduled, without what asyncio keeps of it for debugging: three of its methods
    in Python for every call.
    """

    __slots__ = ()

    def __init__(
        self,
        callback: Any,
        arguments: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._callback = callback
        self._args = arguments
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = None
        self._args = ()


class _Task(asyncio.Task[Any]):
    """A task with a number: sets of tasks, such as a `TaskGroup` has, are in the same order in every
    run, and not in that of their addresses.
    """

    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next event. Threads are calls in the loop, a moment later."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.wall_offset_s = 0.0
        """How far the clock of the machine is off."""
        self._rng = rng
        self._owners: dict[asyncio.Task[Any], str] = {}
        """The process of every task. asyncio alone would let those be collected that only wait."""
        self._stopped: dict[str, list[asyncio.Handle]] = {}
        """What stopped processes do when they go on."""
        self._timers: list[tuple[float, int, _Handle]] = []
        """A heap, whose ties are in the order in which they began."""
        self._numbers = itertools.count()
        self._ready: collections.deque[Any]
        self._stopping: bool
        super().__init__(_NoSockets())

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Any,
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        timer = _Handle(callback, arguments, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Any,
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        timer = _Handle(callback, arguments, self, context)
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """Runs what is due, in the place of asyncio's: to wait is to move the clock."""
        ready = self._ready
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise Deadlock(f"at {self.now:.3f} s nothing is scheduled any more")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])

        # What these begin follows in the next turn.
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            # As `Handle._run`, without a call in Python for each.
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": "a callback failed", "exception": error})

    def time(self) -> float:
        return self.now

    def create_task(  # type: ignore[override]
        self, coroutine: Any, *, context: contextvars.Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        number = next(self._numbers)
        task = _Task(number, coroutine, loop=self, context=context, **options)
        self._owners[task] = process.get() if context is None else context.get(process, "")
        return task

    def tasks_of(self, name: str) -> list[asyncio.Task[Any]]:
        """Returns the tasks of a simulated process that have not ended, in the order in which they
        began: a set would have another one in every run.
        """
        return [task for task, owner in self._owners.items() if owner == name and not task.done()]

    def halt(self, name: str) -> None:
        """Stops a process, as SIGSTOP does: its tasks do nothing until it goes on."""
        self._stopped.setdefault(name, [])

    def go_on(self, name: str) -> None:
        """Lets a stopped process do what it would have done meanwhile."""
        for handle in self._stopped.pop(name, []):
            self._add_callback(handle)  # type: ignore[attr-defined]

    def is_stopped(self, name: str) -> bool:
        return name in self._stopped

    def call_soon(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self._stopped:
            owner = process.get() if context is None else context.get(process, "")
            waiting = self._stopped.get(owner)
            if waiting is not None:
                handle = _Handle(callback, arguments, self, context)
                waiting.append(handle)
                return handle
        handle = _Handle(callback, arguments, self, context)
        self._ready.append(handle)
        return handle

    def _write_to_self(self) -> None:
        """Wakes nobody: there are no other threads."""

    def end_tasks(self) -> None:
        """Ends every task that still waits."""
        for name in list(self._stopped):
            self.go_on(name)
        tasks = [task for task in self._owners if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.wait(tasks))

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Runs the function in the loop, as a thread that starts a moment later."""
        future = self.create_future()
        self._in_thread(functools.partial(function, *arguments), future, _THREAD_S)
        return future

    def in_daemon_thread(
        self, function: Callable[[], Any], _: str, longest_s: float = _THREAD_S
    ) -> concurrent.futures.Future[Any]:
        """Runs the function in the loop, in the place of `common.process.daemon_threads`."""
        future = concurrent.futures.Future[Any]()
        self._in_thread(function, future, longest_s)
        return future

    def _in_thread(self, function: Callable[[], Any], future: Any, longest_s: float) -> None:
        def run() -> None:
            # A thread goes on when nobody waits for it any more.
            try:
                result = function()
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._rng.uniform(0, longest_s), run)


_MANY_OBJECTS = 400_000


@contextmanager
def simulated(seed: int) -> Iterator[VirtualLoop]:
    """Yields a loop; inside the block, clocks and random ids belong to the seed too."""
    rng = random.Random(seed)
    loop = VirtualLoop(rng)
    ids = itertools.count()

    async def in_thread(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        return await loop.run_in_executor(None, function, *arguments)

    random.seed(seed)
    is_collected = gc.isenabled()
    gc.disable()  # one collection at the end is enough
    if is_collected:
        gc.collect()
        # It need not look at what other tests have left and imported. A run before, which somebody
        # may still hold, is less.
        if len(gc.get_objects()) > _MANY_OBJECTS:
            gc.freeze()
    with (
        patch.object(time, "monotonic", lambda: loop.now + 1000.0),
        patch.object(time, "perf_counter", lambda: loop.now + 1000.0),
        patch.object(time, "time", lambda: loop.now + _EPOCH_S + loop.wall_offset_s),
        patch.object(secrets, "token_hex", lambda size=16: f"{next(ids):0{2 * size}x}"),
        patch.object(secrets, "token_urlsafe", lambda _: f"key{next(ids)}"),
        patch.object(secrets, "randbits", lambda _: next(ids)),
        patch.object(anyio.to_thread, "run_sync", in_thread),
        patch.object(fastapi.routing, "_populate_api_route_state", _populated),
        patch.multiple(models, **_KINDS),
        # Only for messages; it reads the source of every endpoint.
        patch.object(fastapi.routing, "_extract_endpoint_context", lambda _: {}),
    ):
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            if is_collected:
                gc.collect()
                gc.enable()
            _spare_modules()


@functools.cache
def _spare_modules() -> None:
    """Spares collections a look at what the first run has imported and made once. Later runs that
    somebody still holds at their end are not spared.
    """
    gc.freeze()
