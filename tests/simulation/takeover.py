"""Simulated runs in which a second trainer begins while the first one still lives: it was paused, cut
off, or only believed to be lost. What the first one does from then on must change nothing.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ServiceError
from common.process import logs
from tests.simulation.episodes import EpisodeWorld
from tests.simulation.scene import Violation
from tests.simulation.stand_ins import Loop
from tests.simulation.virtual_time import VirtualLoop, process
from tests.simulation.world import World
from trainer.rollouts.prompt_cursor import PromptProgress

_T = TypeVar("_T")
_SECOND = "trainer-2"
_ENDS_S = 4_000.0
"""Longest time until the first trainer has noticed."""


class _Thread:
    """A trainer's own thread. It and the loop's never run at once: each waits for the other."""

    def __init__(self, loop: VirtualLoop, function: "Callable[[Loop], _T]", name: str) -> None:
        self._loop = loop
        self._goes = threading.Semaphore(0)
        self._loop_goes = threading.Semaphore(0)
        self.result: asyncio.Future[Any] = loop.create_future()

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
        self._thread = thread

    def wait(self, task: "asyncio.Task[_T]") -> _T:
        if not task.done():
            task.add_done_callback(self._thread.go)
            self._thread.wait()
        return task.result()


class Takeover(World):
    """A run that a second trainer takes over."""

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        super().__init__(seed, directory, loop)
        self._second: _Thread | None = None
        self._is_first_up = False
        self._taken_over_at = 0.0

    def faults(self) -> dict[str, Callable[[], None]]:
        kinds = super().faults()
        # The second trainer is the one that the job group starts again.
        return {name: fault for name, fault in kinds.items() if not name.startswith("trainer")}

    def attempt(self, loop: Loop) -> PromptProgress:
        if self.attempts > 1:
            return super().attempt(loop)
        self.loop.call_later(self.rng.uniform(0.2, 4.0), self._lose_first)
        self._is_first_up = True
        try:
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
        self.loop.call_later(self.rng.uniform(0.0, 20.0), self._begin_second)

    def _begin_second(self) -> None:
        if not self._is_first_up:
            return
        self._taken_over_at = self.loop.now
        self.trained = [item for item in self.trained if item[0] <= self.saved.step]
        self._second = _Thread(self.loop, self.attempt_until_the_end, _SECOND)

    def set_run(self, run_id: str) -> None:
        if process.get() == _SECOND:
            logs._run.set(run_id)  # of this thread alone
        else:
            super().set_run(run_id)


class EpisodeTakeover(Takeover, EpisodeWorld):
    """A run of episodes that a second trainer takes over."""
