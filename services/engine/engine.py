"""The engine: a thread that owns the model and batches continuously.

Every turn of the loop: calls of other threads (submit, pause, abort, new weights) → waiting tickets are prefilled, each
prompt once → one token for every running row → finished rows leave and the batch closes up.
"""

import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.errors import NotReady, Overloaded, ServiceError
from common.observe import Metrics
from learning.weight_group import digest
from services.engine.jobs import Job, Sequence
from services.engine.model import Model
from services.engine.scheduler import PauseMode, Scheduler
from services.engine.weights import own_tensors

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDLE_GATHER_S, _BUSY_GATHER_S = (0.005, 0.06), (0.002, 0.01)
"""How long an arrival waits for more: until so long nothing came, and at most; with no row running, and with some."""


class Engine:
    """Continuous batching over one model. Public methods may be called from any thread and return at once.

    Args:
        model: owned by the engine's thread from `start` on.
        max_running: rows decoded at once.
        max_waiting: sequences that may wait; more are refused with 503.
        seed: of requests without a seed of their own.
        weight_version: label of the weights loaded.
        on_crash: called when the thread ends by an error; a supervisor should then restart the process.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_running: int = 256,
        max_waiting: int = 16_384,
        seed: int = 0,
        weight_version: str = "default",
        metrics: Metrics | None = None,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.max_waiting, self.on_crash = model, max_waiting, on_crash
        self.metrics = metrics or Metrics("rollout-engine")
        generated = self.metrics.counter("engine_generated_tokens_total", "Tokens generated")
        prefilled = self.metrics.counter("engine_prefilled_tokens_total", "Prompt tokens computed")
        self.metrics.gauge("engine_running_sequences", "Rows in the batch").set_function(lambda: self.running)
        self.metrics.gauge("engine_waiting_sequences", "Sequences that wait").set_function(lambda: self.waiting)
        self.metrics.gauge("engine_waiting_sequences_limit", "Sequences that may wait").set(max_waiting)
        self.failure: str | None = None
        self._scheduler = Scheduler(model, max_running, weight_version, generated, prefilled)
        self._random = random.Random(seed)
        self._incoming = 0
        self._arrived = False
        self._calls: deque[Callable[[], None]] = deque()
        self._exclusive: deque[Callable[[], None]] = deque()
        self._unsettled: set[Future[Any]] = set()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; what runs is aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return len(self._scheduler.rows)

    @property
    def waiting(self) -> int:
        """Sequences that are not in the batch yet, or not any more."""
        return self._incoming + self._scheduler.waiting

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        return self._scheduler.paused

    @property
    def weight_version(self) -> str:
        """Label of the weights loaded."""
        return self._scheduler.weight_version

    @property
    def adapters(self) -> dict[str, str]:
        """Names of the LoRA adapters, and their directories."""
        return self._scheduler.adapters.paths()

    def load_adapter(self, name: str, path: Path) -> "Future[None]":
        """Reads a LoRA adapter; fails with BadAdapter. Nothing waits: each request has the adapter that it names."""
        return self._call(lambda: self._scheduler.adapters.load(name, path))

    def retire_adapter(self, name: str) -> "Future[None]":
        """Refuses new requests with this adapter; fails with BadAdapter."""
        return self._call(lambda: self._scheduler.retire_adapter(name))

    def drop_adapter(self, name: str) -> "Future[bool]":
        """Forgets a retired adapter; False while requests use it."""
        return self._call(lambda: self._scheduler.drop_adapter(name))

    def submit(self, jobs: list[Job]) -> None:
        """Queues jobs, all or none; their `done` resolves later. Raises Overloaded when too many sequences wait."""
        with self._wake:
            self._refuse_when_down()
            size = sum(job.n for job in jobs)
            if self.waiting + size > self.max_waiting:
                raise Overloaded(
                    "too many sequences wait", field="n", value=self.waiting + size, remedy=f"at most {self.max_waiting}; retry"
                )
            for job in jobs:
                job.start(self._random.getrandbits(64), lambda: uuid.uuid4().hex)
                self._track(job.done)
            self._incoming += size
            self._arrived = True
            self._calls.append(lambda: self._enqueue(jobs, size))
            self._wake.notify()

    def abort(self, rid: str | None) -> "Future[None]":
        """Ends the job or sequence of that name, or everything when None; partial results are answered."""

        def matches(sequence: Sequence) -> bool:
            return rid is None or rid in (sequence.id, sequence.job.rid)

        return self._call(lambda: self._scheduler.abort(matches))

    def abort_jobs(self, jobs: list[Job]) -> "Future[None]":
        """Ends exactly these jobs (their client has gone)."""
        return self._call(lambda: self._scheduler.abort(lambda sequence: sequence.job in jobs))

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Stops generating; see SGLang's `/pause_generation` for the modes."""
        return self._call(lambda: self._scheduler.pause(mode))

    def resume(self) -> "Future[None]":
        """Generates again."""
        return self._call(lambda: setattr(self._scheduler, "paused", False))

    def flush_cache(self) -> "Future[None]":
        """Gives the memory of the KV cache back; Refused while requests run, or wait for an engine that is not paused."""
        return self._call(self._scheduler.flush_cache)

    def set_version(self, version: str, abort_all: bool) -> "Future[None]":
        """Renames the weights."""

        def rename() -> None:
            if abort_all:
                self._scheduler.abort(lambda _: True)
            self._scheduler.set_version(version)

        return self._call(rename)

    def update_weights(self, path: Path, version: str | None, flush_cache: bool, abort_all: bool) -> "Future[int]":
        """Loads weights in place and returns how many sequences were paused then.

        Waits for running requests unless the engine is paused. Fails with BadWeights or Refused, the old weights in
        place: with rows frozen by an in-place pause the cache cannot be flushed, and unlike SGLang nothing is loaded.
        """
        if abort_all:
            self.abort(None)
        return self._call(lambda: self._scheduler.update(path, version, flush_cache), exclusive=True)

    def load_tensors(
        self, tensors: dict[str, torch.Tensor], version: str | None, flush_cache: bool, abort_all: bool
    ) -> "Future[None]":
        """As `update_weights`, with tensors that `weights.check_tensors` has passed."""
        if abort_all:
            self.abort(None)
        return self._call(lambda: self._scheduler.load_tensors(tensors, version, flush_cache), exclusive=True)

    def checksums(self) -> "Future[dict[str, str]]":
        """A checksum of each tensor of the model."""
        return self._call(lambda: {name: digest(tensor) for name, tensor in own_tensors(self.model.module).items()})

    # ---- below here: the engine's thread only ----

    def _call(self, function: Callable[[], _T], exclusive: bool = False) -> "Future[_T]":
        """Queues `function` for the thread, between two steps; `exclusive`: paused or with no row running."""
        done: Future[_T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except ServiceError as error:
                done.set_exception(error)
            except BaseException as error:
                done.set_exception(error)
                raise

        with self._wake:
            self._refuse_when_down()
            self._track(done)
            (self._exclusive if exclusive else self._calls).append(run)
            self._wake.notify()
        return done

    def _track(self, future: "Future[Any]") -> None:
        """Nobody waits for ever: what is unsettled when the thread ends gets an error."""
        self._unsettled.add(future)
        future.add_done_callback(self._unsettled.discard)

    def _refuse_when_down(self) -> None:
        if self._stopping or self.failure is not None:
            raise NotReady(self.failure or "the engine is ending", remedy="retry on another engine")

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
                self._scheduler.abort(lambda _: True)
            self._settle_rest(NotReady("the engine is ending", remedy="retry on another engine"))
        except BaseException as error:
            log.critical("the engine's thread died", exc_info=error)
            with self._wake:
                self.failure = f"the engine's thread died: {type(error).__name__}: {error}"
            self._settle_rest(ServiceError(self.failure, remedy="the process ends and its supervisor restarts it"))
            self.on_crash()

    def _settle_rest(self, error: ServiceError) -> None:
        for future in list(self._unsettled):
            if not future.done():
                future.set_exception(error)

    def _turn(self) -> None:
        """One turn of the loop; sleeps when there is nothing to do."""
        scheduler = self._scheduler
        with self._wake:
            while not (self._calls or self._stopping or self._can_work()):
                self._wake.wait()
            if self._arrived and self.running < scheduler.max_running:
                self._gather()
            self._arrived = False
        while self._calls:
            self._calls.popleft()()
        while self._exclusive and (scheduler.paused or not self.running):
            self._exclusive.popleft()()
        if not scheduler.paused:
            scheduler.step(admit=not self._exclusive)

    def _gather(self) -> None:
        """Lets a burst of requests arrive whole: one prefill for all, and no step that fights its parsing for the GIL."""
        quiet, most = _BUSY_GATHER_S if self.running else _IDLE_GATHER_S
        limit = time.monotonic() + most
        while self._wake.wait(quiet) and time.monotonic() < limit:
            pass

    def _can_work(self) -> bool:
        return bool(self._exclusive) or (self._scheduler.busy and not self._scheduler.paused)

    def _enqueue(self, jobs: list[Job], size: int) -> None:
        with self._wake:
            self._incoming -= size
        self._scheduler.enqueue(jobs)
