"""Thread and bounded queue of one tracker, and the exit of a process whose tracker hangs."""

import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common import Json
from common.process.security import SecretRedactor
from trainer.trackers.base import RunInfo, load

QUEUE = 1000
"""Maximum number of queued records: hundreds of steps, at one or two records each."""
HANGS_S = 20.0
"""Seconds in one record after which a tracker is said to hang."""
_PREFIX = "tracker "
log = logging.getLogger(__name__)


class TrackerThread:
    """Passes records to a tracker, one at a time.

    A tracker that fails, hangs or falls behind loses records: the first loss is reported with its
    reason, all are counted. `say` prints a line, `count` is called with `written` or `lost` for
    every record, `limit` bounds the queue.
    """

    def __init__(
        self,
        name: str,
        run: RunInfo,
        say: Callable[[str], None],
        count: Callable[[str], None],
        limit: int = QUEUE,
    ) -> None:
        self._name = name
        self._say = say
        self._count = count
        self._limit = limit
        self.written = 0
        self.lost = 0
        # Records so far; each ends as written or lost.
        self._received = 0
        self._queue = queue.SimpleQueue[tuple[str, Json] | None]()
        self._lock = threading.Lock()
        self._closed = False
        self._reported = False
        self._run_finished = False
        # When the tracker got the record that it has not accepted yet; infinity without one.
        self._began = math.inf
        # A daemon: a tracker that hangs must not keep the interpreter from ending.
        self._thread = threading.Thread(
            target=self._run, args=(run,), name=f"{_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def put(self, call: str, **arguments: Any) -> None:
        """Queues a record and returns at once."""
        self._received += 1
        if time.monotonic() - self._began > HANGS_S:
            self._report(f"it hangs: one record takes longer than {HANGS_S:.0f} s")
        if not self._closed and self._queue.qsize() < self._limit:
            self._queue.put((call, arguments))
            return
        self._end_record("lost")
        if not self._closed:
            self._report(f"it is too slow: {self._limit} records are already waiting for it")

    def end(self, finished: bool) -> None:
        """Ends the queue; `wait` waits for the queued records."""
        self._run_finished = finished
        self._queue.put(None)

    def wait(self, deadline: float) -> None:
        """Waits for the tracker to take everything, until `deadline` (`time.monotonic`), then
        abandons it.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._reported = True
            self._say(f"tracker {self._name} did not accept the remaining records in time")
        self._close()
        if self.lost:
            self._say(f"tracker {self._name}: {self.lost} of {self._received} records are lost")

    def _run(self, run: RunInfo) -> None:
        try:
            tracker = load(self._name)(run)
            self._say(f"tracker {self._name}: {tracker.where}")
            while (record := self._queue.get()) is not None and not self._closed:
                call, arguments = record
                self._began = time.monotonic()
                try:
                    getattr(tracker, call)(**arguments)
                    self._end_record("written")
                except Exception as error:
                    self._end_record("lost")
                    self._report_error(error)
                self._began = math.inf
            if not self._closed:
                tracker.close(self._run_finished)
        except (Exception, SystemExit) as error:  # a library's sys.exit ends only this thread
            self._report_error(error)
        self._close()

    def _end_record(self, result: str) -> None:
        """Counts the end of one record. What a tracker writes after it was closed is lost."""
        with self._lock:
            if result == "written" and not self._closed:
                self.written += 1
                self._count("written")
            elif self.written + self.lost < self._received:
                self.lost += 1
                self._count("lost")

    def _close(self) -> None:
        """Gives up on the records that are left."""
        self._closed = True
        for _ in range(self._received - self.written - self.lost):
            self._end_record("lost")

    def _report_error(self, error: BaseException) -> None:
        log.debug("tracker %s", self._name, exc_info=error)
        reason = " ".join(f"{type(error).__name__}: {error}"[:500].split())
        self._report(SecretRedactor().redact(reason))

    def _report(self, reason: str) -> None:
        """Says why records are lost; only the first reason."""
        if not self._reported:
            self._reported = True
            self._say(
                f"tracker {self._name}: {reason}. The run continues; records that it does not "
                "accept are lost and counted"
            )


@contextmanager
def exit_despite_hung_tracker() -> Iterator[None]:
    """Ends the process at once, with its exit status, if a tracker was abandoned.

    Exit hooks of its library may block forever: wandb's waits until everything is sent.
    """
    try:
        yield
    finally:
        if any(thread.name.startswith(_PREFIX) for thread in threading.enumerate()):
            error = sys.exc_info()[1]
            status = 0
            if isinstance(error, SystemExit):
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            elif error is not None:
                traceback.print_exception(error)
                status = 1
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
