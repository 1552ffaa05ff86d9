"""Threads for environment methods, which may hang: Python cannot end a thread, but another thread
can replace it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from common.process.daemon_threads import in_daemon_thread, sent_on
from services.environment.clock import EpisodeClock
from services.environment.outcome import EnvironmentLost, timed_out

log = logging.getLogger(__name__)
_BEAT_S = 1.0
"""Seconds between two looks at the users' event loop."""
BLOCKED_S = 30.0
"""Seconds in which a coroutine may block that loop."""
_BLOCKED = "another coroutine of the environment blocked their event loop"


@dataclass(eq=False)
class _Coroutine:
    """A coroutine that runs in the user's event loop."""

    task: "asyncio.Task[Any] | None" = None
    future: "asyncio.Future[Any] | None" = None
    """The caller's view of it."""
    is_lost: bool = False
    """Whether another coroutine has blocked the loop."""


class _UserLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls: set[_Coroutine] = set()
        self._ended = asyncio.Event()
        in_daemon_thread(self._serve, "environment-loop")
        # Until it has begun, it would count as blocked, and the time as the tool's.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result()

    async def responds(self, within_s: float) -> bool:
        """Returns whether the loop runs its next callbacks within some seconds, so is not
        blocked.
        """
        beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
        done, _ = await asyncio.wait((asyncio.wrap_future(beat),), timeout=within_s)
        return bool(done)

    def end(self) -> None:
        """Cancels what runs in the loop and closes it, unless it is blocked."""
        self.loop.call_soon_threadsafe(self._ended.set)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._ended.wait())


class Threads:
    """Runs each call in a thread of its own, at most `limit` at once; further calls wait.
    Coroutines share the event loop of one thread, which is replaced when one of them blocks it.

    A call whose caller has given up, or whose time is over, keeps its thread until it ends, but
    frees its slot and counts as `hung`. At `limit` hung calls, no more calls are accepted. The
    threads end with the process, whatever they do.

    All counts belong to the event loop: the threads themselves only run calls.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hung = 0
        self._slots = asyncio.Semaphore(limit)
        self._user_loop: _UserLoop | None = None
        self._watches: set[asyncio.Task[None]] = set()

    @property
    def problem(self) -> str | None:
        """Why no more calls are accepted, or None."""
        if self.hung < self.limit:
            return None
        return (
            f"{self.hung} calls of the environment are stuck, the limit is {self.limit} "
            "(environment.workers): restart this server"
        )

    async def run(
        self,
        function: Callable[[], Any],
        name: str,
        timeout_s: float | None = None,
        clock: EpisodeClock | None = None,
    ) -> Any:
        """Returns or raises what `function` does. `clock` stands still while it waits for a thread.

        Raises EnvironmentLost when too many calls hang, and ToolFailed `timeout_s` seconds after
        the beginning of the call.
        """
        with clock.stopped() if clock else nullcontext():
            await self._slots.acquire()
        try:
            return await self._run_now(function, name, timeout_s)
        finally:
            self._slots.release()

    async def _run_now(
        self, function: Callable[[], Any], name: str, timeout_s: float | None
    ) -> Any:
        self._check()
        done = asyncio.wrap_future(in_daemon_thread(function, "environment"))
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await asyncio.shield(done)
        except (asyncio.CancelledError, TimeoutError):
            if not done.done():
                self._count_hung(name)
                done.add_done_callback(lambda _: self._end_hung())
            if limit.expired():
                raise timed_out(timeout_s) from None
            raise

    async def run_coroutine(
        self, function: Callable[[], Any], name: str, timeout_s: float | None = None
    ) -> Any:
        """Returns or raises what an awaitable that `function` makes does, in the users' event loop.

        Raises EnvironmentLost when another coroutine has blocked that loop, or too many hang, and
        ToolFailed after `timeout_s` seconds, when the coroutine is cancelled.
        """
        self._check()
        if self._user_loop is None:
            self._user_loop = _UserLoop()
            watch = asyncio.create_task(self._watch(self._user_loop, name))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

        user_loop = self._user_loop
        call = _Coroutine()
        call.future = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_guarded(function, call), user_loop.loop)
        )
        user_loop.calls.add(call)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await call.future
        except TimeoutError:
            if not limit.expired():  # the user's own
                raise
            # If another coroutine blocks the loop, this one was lost and not too slow.
            is_blocked = not await user_loop.responds(_BEAT_S)
            if is_blocked and asyncio.current_task(user_loop.loop) is not call.task:
                raise EnvironmentLost(_BLOCKED) from None
            raise timed_out(timeout_s) from None
        except asyncio.CancelledError:
            if call.is_lost:
                raise EnvironmentLost(_BLOCKED) from None
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise RuntimeError("CancelledError") from None  # of the user, not of this episode
        finally:
            user_loop.calls.discard(call)

    async def _watch(self, user_loop: _UserLoop, name: str) -> None:
        """Replaces an event loop that a coroutine blocks. That coroutine goes on; all others are
        lost.
        """
        while True:
            await asyncio.sleep(_BEAT_S)
            if await user_loop.responds(BLOCKED_S):
                continue

            self._user_loop = None
            self._count_hung(name)
            blocking = asyncio.current_task(user_loop.loop)
            for call in user_loop.calls:
                if call.task is not blocking and call.future is not None:
                    call.is_lost = True
                    call.future.cancel()
            while not await user_loop.responds(BLOCKED_S):
                pass
            self._end_hung()
            while user_loop.calls:  # noqa: ASYNC110
                await asyncio.sleep(_BEAT_S)
            user_loop.end()
            return

    def close(self) -> None:
        """Ends the users' event loop, unless it is blocked."""
        for watch in self._watches:
            watch.cancel()
        if self._user_loop is not None:
            self._user_loop.end()
            self._user_loop = None

    def _check(self) -> None:
        """Raises EnvironmentLost when no more calls are accepted."""
        if self.problem is not None:
            raise EnvironmentLost(self.problem)

    def _end_hung(self) -> None:
        self.hung -= 1

    def _count_hung(self, name: str) -> None:
        self.hung += 1
        log.warning(
            "%s is still running although nobody waits for it any more: "
            "%d such calls hold their threads, the limit is %d",
            name,
            self.hung,
            self.limit,
        )


async def _guarded(function: Callable[[], Any], call: _Coroutine) -> Any:
    """Awaits what `function` makes; an exception that would end the event loop becomes another."""
    call.task = asyncio.current_task()
    try:
        return await function()
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as ending:
        raise sent_on(ending) from ending
