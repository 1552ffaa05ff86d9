"""One tracker as the trainer sees it: a queue, a thread, and the tracker's process behind it."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.security import TOKEN, Hider

QUEUE = 1000
"""Records that may wait. A step makes one or two, so this is hundreds of steps."""
_LAST_WORDS_S = 5.0
"""For the process to end by itself when it has nothing more to do."""
_END = None
_UNTOLD = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""Libraries do not tell their makers of a run, unless the environment says otherwise."""


class Outlet:
    """Hands records to a tracker's process, one at a time, each when the one before was taken.

    A tracker that fails, hangs or falls behind loses records: the first is told, all are counted.

    Args:
        name: of the tracker, as in `trackers.names`.
        start: content of its `RunInfo`.
        directory: gets its output, `NAME.log`.
        say: tells a person.
        count: is told `written` or `lost` for every record.
        limit: records that may wait.
    """

    def __init__(
        self,
        name: str,
        start: dict[str, Any],
        directory: Path,
        say: Callable[[str], None],
        count: Callable[[str], None],
        limit: int = QUEUE,
    ) -> None:
        self.name, self._say, self._count = name, say, count
        self.log = directory / f"{name.replace(':', '.')}.log"
        self.written = self.lost = 0
        self._lock = threading.Lock()
        self._limit, self._queue = limit, queue.SimpleQueue[tuple[str, dict[str, Any]] | None]()
        self._finished, self._over, self._told = False, False, False
        # It finds the modules that this process finds. The token of the run is nothing to a tracker.
        env = _UNTOLD | {key: value for key, value in os.environ.items() if key != TOKEN}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.trackers.process", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe_in, self._pipe_out = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._feed, args=(start,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: str, **arguments: Any) -> None:
        """Queues a record; returns at once."""
        if self._over:
            self._lose()
        elif self._queue.qsize() >= self._limit:
            self._lose(f"it is too slow: {self._limit} records wait for it already")
        else:
            self._queue.put((call, arguments))

    def end(self, finished: bool) -> None:
        """No more records come; `wait` waits for those that are queued."""
        self._finished = finished
        self._queue.put(_END)

    def wait(self, deadline: float) -> None:
        """Until everything is taken, at most until `deadline` (`time.monotonic`); then it is killed."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._told = True
            self._say(f"tracker {self.name} did not take what was left in the time it had")
            self._process.kill()
            self._thread.join()
        self._lose_rest()
        if self.lost:
            self._say(f"tracker {self.name}: {self.lost} of {self.written + self.lost} records are lost; see {self.log}")

    # ------------------------------------------------------------ the thread

    def _feed(self, start: dict[str, Any]) -> None:
        try:
            where = self._ask("start", start)
            self._say(f"tracker {self.name}: {where}")
            while (record := self._queue.get()) is not _END:
                self._hand_over(*record)
            self._ask("close", {"finished": self._finished})
        except _Failed as error:
            self._tell(str(error))
        except (OSError, ValueError):
            self._tell("its process has ended")
        finally:
            self._over = True
            self._lose_rest()
            with suppress(OSError):  # of a process that is gone, with something left to be sent to it
                self._pipe_in.close()
            self._end_process()
            self._pipe_out.close()

    def _end_process(self) -> None:
        try:
            self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hand_over(self, call: str, arguments: dict[str, Any]) -> None:
        try:
            self._ask(call, arguments)
        except _Failed as error:
            self._lose(str(error))
        except (OSError, ValueError):
            self._lose("its process has ended")
            raise
        else:
            self.written += 1
            self._count("written")

    def _ask(self, call: str, arguments: dict[str, Any]) -> str:
        """What the tracker answers. Raises _Failed with its error, OSError or ValueError when there is no answer."""
        self._pipe_in.write(json.dumps([call, arguments]) + "\n")
        self._pipe_in.flush()
        answer = json.loads(self._pipe_out.readline())
        if "error" in answer:
            raise _Failed(answer["error"])
        return str(answer["done"])

    # ------------------------------------------------------------ what is said

    def _lose_rest(self) -> None:
        while not self._queue.empty():
            if self._queue.get() is not _END:
                self._lose()

    def _lose(self, reason: str = "") -> None:
        with self._lock:
            self.lost += 1
        self._count("lost")
        if reason:
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Once."""
        if not self._told:
            self._told = True
            reason = Hider().text(" ".join(reason.split()))
            self._say(f"tracker {self.name}: {reason}. The run goes on; what it does not take is lost and counted ({self.log})")


class _Failed(Exception):
    """The tracker's own words."""
