"""Simulated runs in which a second trainer begins while the first one still lives: it was paused, cut
off, or only believed to be lost. What the first one does from then on must change nothing.
"""

import asyncio
import contextvars
import errno
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from common.errors import ConfigError, ServiceError
from common.process import logs, run_lock
from common.process.run_lock import LOCK, RunLock
from common.process.storage import StorageFailed
from tests.simulation.episodes import EpisodeWorld
from tests.simulation.scene import Violation
from tests.simulation.stand_ins import Loop
from tests.simulation.virtual_time import VirtualLoop, process
from tests.simulation.world import Checkpoint, World
from trainer.rollouts.prompt_cursor import PromptProgress

_T = TypeVar("_T")
_SECOND = "trainer-2"
_ENDS_S = 4_000.0
"""Longest time until the first trainer has noticed."""
_STARTS_AGAIN_S = 10.0
_WATCHES_S = 29.0
"""Shortest time for which a run watches the heartbeat of another one before it takes over."""


class _Thread:
    """A trainer's own thread. It and the loop's never run at once: each waits for the other."""

    def __init__(
        self, loop: VirtualLoop, function: "Callable[[_LoopOfThread], _T]", name: str
    ) -> None:
        self._loop = loop
        self._goes = threading.Semaphore(0)
        self._loop_goes = threading.Semaphore(0)
        self.result: asyncio.Future[Any] = loop.create_future()
        # A trainer that never gets the directory is still waiting for it when the run ends.
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())

        def work() -> None:
            self._goes.acquire()
            process.set(name)
            try:
                self.result.set_result(function(_LoopOfThread(loop, self)))
            except BaseException as error:
                if not self.result.done():
                    self.result.set_exception(error)
            self._loop_goes.release()

        run = contextvars.Context().run
        threading.Thread(target=run, args=(work,), daemon=True).start()
        self.go()

    def go(self, _: object = None) -> None:
        """Lets it run until it waits; called by the loop."""
        self._goes.release()
        self._loop_goes.acquire()

    def wait(self) -> None:
        """Lets the loop run until it calls `go`; called by the thread."""
        self._loop_goes.release()
        self._goes.acquire()


class _LoopOfThread(Loop):
    """The event loop of a trainer that another one drives."""

    def __init__(self, loop: VirtualLoop, thread: _Thread) -> None:
        super().__init__(loop)
        self.thread = thread

    def wait(self, task: "asyncio.Task[_T]") -> _T:
        if not task.done():
            task.add_done_callback(self.thread.go)
            self.thread.wait()
        return task.result()


class _Ended:
    """The event that ends the heartbeat of a lock."""

    def __init__(self) -> None:
        self.is_set = False
        self._waits = 0

    def set(self) -> None:
        self.is_set = True

    def wait(self, _: float) -> bool:
        """Lets one beat be made by every call of `RunLock._beat`."""
        self._waits += 1
        return self.is_set or self._waits % 2 == 0


class _Beating:
    """The thread of a lock's heartbeat: a task of the process, which stops when that is stopped."""

    def __init__(self, loop: VirtualLoop, target: Callable[[], None]) -> None:
        self._loop = loop
        self._target = target
        self._ended: _Ended = target.__self__._ended  # type: ignore[attr-defined]

    def start(self) -> None:
        self._loop.create_task(self._run())

    async def _run(self) -> None:
        while not self._ended.is_set:
            await asyncio.sleep(run_lock._BEAT_S)
            self._target()

    def join(self) -> None:
        """Nobody waits for it: it does nothing once the lock is given back."""


class Takeover(World):
    """A run that a second trainer takes over. In every third seed the lock on their directory is the
    real one, on a volume that two machines share and the kernel's lock does not reach.
    """

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        super().__init__(seed, directory, loop)
        self._has_lock = seed % 3 == 2
        self._locks: dict[str, RunLock] = {}
        """By process."""
        self._loops: dict[str, Loop] = {}
        self._volume_back_at = 0.0
        """Until then the first trainer does not reach the volume."""
        self._second_lacks_at = math.inf
        """For a second from then on the other one does not reach it."""
        self._second: _Thread | None = None
        self._is_first_up = False
        self._taken_over_at = 0.0

    def faults(self) -> dict[str, Callable[[], None]]:
        kinds = super().faults()
        # The second trainer is the one that the job group starts again.
        return {name: fault for name, fault in kinds.items() if not name.startswith("trainer")}

    def stand_ins(self, stack: ExitStack) -> None:
        super().stand_ins(stack)
        if not self._has_lock:
            return

        def sleep(seconds: float) -> None:
            self._loops[process.get()].sleep(seconds)

        def read(file: int, size: int, offset: int) -> bytes:
            self._reach_volume()
            return os.pread(file, size, offset)

        def write(file: int, content: bytes, offset: int) -> int:
            self._reach_volume()
            return os.pwrite(file, content, offset)

        def truncate(file: int, size: int) -> None:
            self._reach_volume()
            os.ftruncate(file, size)

        files = {"pread": read, "pwrite": write, "ftruncate": truncate}
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep, strftime=time.strftime)
        threads = SimpleNamespace(
            Event=_Ended, Thread=lambda target, **_: _Beating(self.loop, target)
        )
        kernel = SimpleNamespace(flock=lambda *_: None, LOCK_EX=0, LOCK_NB=0)
        for name, stand_in in {
            "os": SimpleNamespace(**{**vars(os), **files}),
            "time": clock,
            "threading": threads,
            "fcntl": kernel,
            "_machine": lambda: f"the machine of {process.get() or 'trainer'}",
        }.items():
            stack.enter_context(patch.object(run_lock, name, stand_in))

    def _reach_volume(self) -> None:
        """Raises OSError while the volume does not answer to the process."""
        if self._lacks_volume():
            raise OSError(errno.ETIMEDOUT, "the volume does not answer")

    def _lacks_volume(self) -> bool:
        if process.get() == _SECOND:
            return self._second_lacks_at < self.loop.now < self._second_lacks_at + 1.0
        return self.loop.now < self._volume_back_at

    @contextmanager
    def _locked(self, loop: Loop) -> Iterator[None]:
        """Holds the directory for the process inside the block. Raises ConfigError."""
        if not self._has_lock:
            yield
            return
        name = process.get()
        self._loops[name] = loop
        with RunLock(self._directory, name or "trainer") as self._locks[name]:
            yield

    def check_lock(self) -> None:
        if self._has_lock and process.get() in self._locks:
            self._locks[process.get()].check()

    def save(self, saved: Checkpoint, attempt: int) -> None:
        if self._has_lock and self._lacks_volume():
            self.story.say("no checkpoint is written: the volume does not answer")
            return
        self.check_lock()
        if self._has_lock and attempt != self.attempts:
            raise Violation("a run whose directory another one has taken over wrote a checkpoint")
        super().save(saved, attempt)

    def _check_entry(self) -> None:
        """Checks that the first trainer left the directory to the second one, if that still runs."""
        if self._has_lock and self._second is not None and not self._second.result.done():
            entry = json.loads((self._directory / LOCK).read_text() or "{}")
            if entry.get("run") != _SECOND:
                raise Violation(f"the second trainer holds the directory, which says {entry}")

    def attempt(self, loop: Loop) -> PromptProgress:
        if self.attempts > 1:
            return super().attempt(loop)
        self.loop.call_later(self.rng.uniform(0.2, 4.0), self._lose_first)
        self._is_first_up = True
        try:
            with self._locked(loop):
                progress = super().attempt(loop)
        except ServiceError as error:
            if self._second is None:
                raise
            self.story.say(f"the first trainer ends: {error}")
        else:
            if self._second is None:
                return progress
            self.story.say("the first trainer has done its last step")
        finally:
            self._is_first_up = False
        self._check_entry()
        if self.loop.now > self._taken_over_at + _ENDS_S:
            raise Violation("the first trainer did not notice that another one had taken over")
        result: PromptProgress = self.loop.run_until_complete(self._second.result)
        return result

    def end_attempt(self) -> None:
        for task in self.loop.tasks_of(_SECOND):
            task.cancel()
        if not self._is_first_up:
            super().end_attempt()

    def check_failure(self, error: ServiceError) -> None:
        # The first one's call with which a run begins may have come last, once.
        superseded = [each for each in self.failures if each.code == "superseded"]
        if error not in superseded[:1]:
            super().check_failure(error)

    def _lose_first(self) -> None:
        """Lets whoever starts trainers believe that the first one has ended."""
        if not self._is_first_up:
            return
        kind = self.rng.choice(("paused", "cut off", "forgotten"))
        seconds = self.rng.choice((5.0, 30.0, 400.0))
        self.story.fault("two trainers", f"the first is {kind} for {seconds:.0f} s")
        if kind == "paused":
            self.loop.halt("")
            self.loop.call_later(seconds, self.loop.go_on, "")
        elif kind == "cut off":
            self.net.cut("trainer", "*", seconds)
        if kind != "paused":
            self._volume_back_at = self.loop.now + seconds
        self.loop.call_later(self.rng.uniform(0.0, 20.0), self._begin_second)

    def _begin_second(self) -> None:
        if not self._is_first_up:
            return
        _Thread(self.loop, self._run_second, _SECOND)

    def _run_second(self, loop: "_LoopOfThread") -> PromptProgress | None:
        """Runs the second trainer, unless the directory is in use, or free."""
        began = self.loop.now
        if self.seed % 9 == 2 and self._second_lacks_at == math.inf:
            # While it watches the heartbeat of the first one. Apart: the others stay what they are.
            self._second_lacks_at = began + random.Random(self.seed).uniform(0.0, _WATCHES_S)
        try:
            with self._locked(loop):
                if not self._is_first_up:
                    return None
                self._second = loop.thread
                self._taken_over_at = self.loop.now
                if self._has_lock and self.loop.now - began < _WATCHES_S:
                    raise Violation("a run took over the directory of one that lives")
                self.trained = [item for item in self.trained if item[0] <= self.saved.step]
                return self.attempt_until_the_end(loop)
        except ConfigError as error:
            self.story.say(f"the second trainer ends: {error.code}")
            if error.code != "run_in_use":
                raise
            return None
        except StorageFailed as error:
            self.story.say(f"the second trainer ends: {error.message}")
            # The job group starts it again.
            self.loop.call_later(_STARTS_AGAIN_S, self._begin_second)
            return None

    def set_run(self, run_id: str) -> None:
        if process.get() == _SECOND:
            logs._run.set(run_id)  # of this thread alone
        else:
            super().set_run(run_id)


class EpisodeTakeover(Takeover, EpisodeWorld):
    """A run of episodes that a second trainer takes over."""
