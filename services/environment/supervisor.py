"""Keeps the server of one node of several alive.

A job group restarts all nodes of a task when a process of one has failed. Started again by its own node, a server that crashed
costs the episodes of that node alone.
"""

import logging
import os
import signal
import subprocess
import threading
import time

from common.topology import WRONG_SETTING

log = logging.getLogger(__name__)
VARIABLE = "ENVIRONMENT_SUPERVISED"
_STABLE_S, _MAX_FAILURES = 60.0, 5
"""After so long alive a failure counts as the first again; after so many in a row the node fails."""


def keep_alive(command: list[str]) -> int:
    """Runs `command`, again whenever it fails; returns its exit status when it ends well, is ended, or fails too often.

    SIGTERM and SIGINT go to the command, once.
    """
    failures, stopping, current = 0, False, list[subprocess.Popen[bytes]]()

    def stop(number: int, _: object) -> None:
        nonlocal stopping
        stopping = True
        for child in current:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while True:
        started = time.monotonic()
        current[:] = [subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, VARIABLE: "1"})]
        status = current[0].wait()
        failures = 1 if time.monotonic() - started > _STABLE_S else failures + 1
        if stopping or status in (0, WRONG_SETTING) or failures >= _MAX_FAILURES:
            return status if status >= 0 else 128 - status
        log.error("the server of this node ended with status %d: it is started again", status)
        time.sleep(min(8.0, 0.5 * 2**failures))


def end_with_parent() -> None:
    """Ends this process when the one that keeps it alive has ended in any way."""
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what this process starts reads nothing from the pipe
    os.close(nothing)

    def watch() -> None:
        while os.read(pipe, 4096):  # nothing is ever written: it returns at end of file
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
