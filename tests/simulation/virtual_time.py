"""An event loop whose clock is virtual: nothing waits, and every run with one seed is the same."""

import asyncio
import functools
import gc
import itertools
import random
import secrets
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import anyio.to_thread
import fastapi.routing
import fastapi.utils

_EPOCH_S = 1.7e9
_THREAD_S = 0.002
"""Longest time until a thread runs what it was given."""
_model_field = functools.cache(fastapi.utils.create_model_field)
"""FastAPI's description of an answer. A service that starts again has the same ones: to make them
is half the time of a simulated run."""


class Deadlock(Exception):
    """Everything waits for something that will never happen."""


class _NoSockets(selectors.BaseSelector):
    """A selector without sockets: to wait is to move the clock."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
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
        assert self.loop is not None
        if timeout is None:
            raise Deadlock(f"at {self.loop.time():.3f} s nothing is scheduled any more")
        self.loop.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next event. Threads are calls in the loop, a moment later."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.wall_offset_s = 0.0
        """How far the clock of the machine is off."""
        self._rng = rng
        selector = _NoSockets()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Runs the function in the loop, as a thread that starts a moment later."""
        future = self.create_future()

        def run() -> None:
            # A thread goes on when nobody waits for it any more.
            try:
                result = function(*arguments)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._rng.uniform(0, _THREAD_S), run)
        return future


@contextmanager
def simulated(seed: int) -> Iterator[VirtualLoop]:
    """Yields a loop; inside the block, clocks and random ids belong to the seed too."""
    rng = random.Random(seed)
    loop = VirtualLoop(rng)
    ids = itertools.count()

    async def in_thread(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        return await loop.run_in_executor(None, function, *arguments)

    random.seed(seed)
    gc.freeze()  # a collection need not look at the modules: a quarter of the time of a run
    with (
        patch.object(time, "monotonic", lambda: loop.now + 1000.0),
        patch.object(time, "perf_counter", lambda: loop.now + 1000.0),
        patch.object(time, "time", lambda: loop.now + _EPOCH_S + loop.wall_offset_s),
        patch.object(secrets, "token_hex", lambda size=16: f"{next(ids):0{2 * size}x}"),
        patch.object(secrets, "randbits", lambda _: next(ids)),
        patch.object(anyio.to_thread, "run_sync", in_thread),
        patch.object(fastapi.routing, "create_model_field", _model_field),
    ):
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            gc.unfreeze()
