"""Keeps the server of one node alive in a task with several nodes.

A job group restarts all nodes of a task when a process on one node fails. If the node itself
restarts a crashed server, only the episodes of that node are lost.
"""

import logging
import os
import signal
import subprocess
import threading
import time

from common.process.exits import SIGNALLED, how_ended
from common.process.topology import WRONG_SETTING

log = logging.getLogger(__name__)
VARIABLE = "ENVIRONMENT_SUPERVISED"
_STABLE_S = 60.0
"""After this many seconds alive, a failure counts as the first again."""
_MAX_FAILURES = 5
"""After this many failures in a row the node fails."""


def keep_alive(command: list[str]) -> int:
    """Runs `command` and restarts it when it fails; returns its exit status.

    It returns when the command succeeds, is stopped, or fails too often. SIGTERM and SIGINT are
    forwarded to it.
    """
    failures = 0
    stopped_by = 0
    server: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        nonlocal stopped_by
        stopped_by = number
        if server is not None:
            server.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while True:
        started = time.monotonic()
        # The pipe is never written: its end tells the server that this process has ended.
        server = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {VARIABLE: "1"})
        if stopped_by:  # during the pause or the start, before `stop` knew it
            server.send_signal(stopped_by)
        status = server.wait()
        failures = 1 if time.monotonic() - started > _STABLE_S else failures + 1

        if stopped_by or status in (0, WRONG_SETTING) or failures >= _MAX_FAILURES:
            return status if status >= 0 else SIGNALLED - status
        log.error("the server of this node %s: it is started again", how_ended(status))
        time.sleep(min(8.0, 0.5 * 2**failures))


def end_with_parent() -> None:
    """Ends this process when its supervisor has ended, however that ended."""
    pipe = os.dup(0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)  # so that child processes do not read from the pipe
    os.close(devnull)

    def watch() -> None:
        while os.read(pipe, 4096):  # nothing is ever written: it returns at end of file
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
