"""The engine: a thread that owns the model and batches continuously.

Each iteration runs the calls of other threads (submit, pause, abort, new weights), prefills waiting
prompts once each, decodes one token for every running row, and removes finished rows from the
batch.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from common.errors import NotReady, Overloaded, ServiceError, ServiceLost
from common.process.metrics import Metrics
from services.engine.failures import described, remedy
from services.engine.jobs import GenerationJob
from services.engine.model import Model
from services.engine.scheduler import Scheduler

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDLE_GATHER_S = (0.003, 0.06)
_BUSY_GATHER_S = (0.002, 0.01)
"""Seconds to wait for more requests after one arrived, as (without a new one, in total): when no
row runs, when some do."""


class Engine:
    """Continuous batching over one model. Public methods may be called from any thread and return
    at once.

        engine = Engine(Model(directory, max_context_tokens=2048), max_running=3)
        engine.start()
        job = GenerationJob("b", [5, 6], SamplingParams(max_new_tokens=8), n=2)
        engine.submit([job])
        first, second = job.done.result()      # two completions (`Sequence`)

    What its thread does when job A (n = 1) runs, and B (n = 2) and C (n = 1) arrive together:

        step  rows      what happens
        1     A         B and C arrive; the thread waits a few ms for more of them (`_gather`)
        2     A B1 B2   B's prompt is computed once, for both rows; C finds no free row and waits
        3     A B1 B2   every row gets its next token
        4     B2 B1     A met a stop token: the last row fills its gap (`Rows.remove`)
        5     B2 B1 C   C's prompt is computed, and all rows get their next token

    After `start`, the engine's thread owns `model` and `scheduler`; other threads change them only
    through `call`. When the thread ends with an error it calls `on_crash`, which may end the
    process for the node's agent to restart; if it returns, every waiting and every later call gets
    the `failure`.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_running: int = 256,
        max_waiting: int = 16_384,
        seed: int = 0,
        weight_version: str = "default",
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.max_waiting = max_waiting
        self.on_crash = on_crash
        self.metrics = Metrics("rollout-engine")
        generated = self.metrics.counter("engine_generated_tokens_total", "Tokens generated")
        prefilled = self.metrics.counter("engine_prefilled_tokens_total", "Prompt tokens computed")
        self.metrics.gauge("engine_running_sequences", "Sequences being decoded").set_function(
            lambda: self.running
        )
        self.metrics.gauge("engine_waiting_sequences", "Sequences that wait").set_function(
            lambda: self.waiting
        )
        self.metrics.gauge("engine_waiting_sequences_limit", "Sequences that may wait").set(
            max_waiting
        )
        self.failure: ServiceLost | None = None
        """Why the thread died, if it did."""
        self.scheduler = Scheduler(
            model, max_running, weight_version, generated=generated, prefilled=prefilled
        )
        self._random = random.Random(seed)
        self._incoming = 0
        self._arrived = False
        self._calls: deque[Callable[[], None]] = deque()
        self._exclusive: deque[Callable[[], None]] = deque()
        self._pending: set[Future[Any]] = set()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step and aborts the running requests."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def running(self) -> int:
        """The number of sequences being decoded."""
        return len(self.scheduler.rows)

    @property
    def waiting(self) -> int:
        """Sequences outside the batch: new or retracted."""
        return self._incoming + self.scheduler.waiting

    def submit(self, jobs: list[GenerationJob]) -> None:
        """Queues all jobs or none; their `done` futures resolve later.

        Raises Overloaded when too many sequences wait, NotReady when the engine stops, ServiceLost
        when its thread died.
        """
        size = sum(job.n for job in jobs)

        def enqueue() -> None:
            with self._wake:
                self._incoming -= size
            self.scheduler.enqueue(jobs)

        with self._wake:
            self._refuse_when_down()
            if self.waiting + size > self.max_waiting:
                raise Overloaded(
                    "too many sequences are waiting",
                    field="n",
                    value=self.waiting + size,
                    remedy=f"retry later; at most {self.max_waiting} may wait",
                )
            for job in jobs:
                job.start(self._random.getrandbits(64))
                self._track(job.done)
            self._incoming += size
            self._arrived = True
            self._calls.append(enqueue)
            self._wake.notify()

    def call(self, function: Callable[[Scheduler], _T], exclusive: bool = False) -> "Future[_T]":
        """Runs `function` on the engine's thread between two steps; `exclusive` waits until no row
        runs.

        Raises NotReady when the engine stops, ServiceLost when its thread died. A ServiceError from
        `function` goes only to the future; any other error ends the thread.
        """
        done: Future[_T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(self.scheduler))
            except ServiceError as error:
                done.set_exception(error)

        with self._wake:
            self._refuse_when_down()
            self._track(done)
            queue = self._exclusive if exclusive else self._calls
            queue.append(run)
            self._wake.notify()
        return done

    async def run(self, function: Callable[[Scheduler], _T], exclusive: bool = False) -> _T:
        """Waits for `call` in an event loop, and returns what `function` returns."""
        return await asyncio.wrap_future(self.call(function, exclusive))

    def _track(self, future: "Future[Any]") -> None:
        """Makes sure that the future gets an error if the thread ends before it is done."""
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def _refuse_when_down(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._stopping:
            raise NotReady("the engine is stopping", remedy="retry on another engine")

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._iterate()
                self.scheduler.abort()
            self._fail_pending(NotReady("the engine is stopping", remedy="retry on another engine"))
        except BaseException as error:
            log.critical("the engine's thread died", exc_info=error)
            # First: where an agent restarts the process, no caller may learn that the engine is
            # lost.
            self.on_crash()
            with self._wake:
                self.failure = ServiceLost(
                    f"the engine has died: {described(error)}", remedy=remedy(error)
                )
            self._fail_pending(self.failure)

    def _fail_pending(self, error: ServiceError) -> None:
        for future in list(self._pending):
            if not future.done():
                future.set_exception(error)

    def _iterate(self) -> None:
        """Runs one iteration of the loop; sleeps when there is nothing to do."""
        scheduler = self.scheduler
        with self._wake:
            while not (self._calls or self._stopping or self._exclusive or scheduler.can_step):
                self._wake.wait()
            # Without a free row, requests can only wait: gathering them would hold up the others.
            if self._arrived and self.running < scheduler.max_running:
                self._gather()
            self._arrived = False
        while self._calls:
            self._calls.popleft()()
        while self._exclusive and not self.running:
            self._exclusive.popleft()()
        if not scheduler.paused:
            # New rows would put off a call that waits until none runs, for ever under load.
            scheduler.step(admit=not self._exclusive)

    def _gather(self) -> None:
        """Waits for the rest of a burst of requests: one prefill serves all, and no step slows down
        their parsing.
        """
        quiet_s, total_s = _BUSY_GATHER_S if self.running else _IDLE_GATHER_S
        deadline = time.monotonic() + total_s
        while self._wake.wait(quiet_s) and time.monotonic() < deadline:
            pass
