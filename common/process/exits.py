"""How a process ended, in words."""

import signal
from contextlib import suppress

SIGNALLED = 128
"""Exit statuses above this are those of processes that a signal ended."""
_WHO = {signal.SIGKILL: "; the kernel does so when memory runs out"}


def how_ended(status: int) -> str:
    """Returns the words that follow the name of a process with this exit status: `ended with status
    3`, `was killed by SIGKILL (status 137 …)`. A negative status is a signal, as in `subprocess`.
    """
    if status < 0:
        status = SIGNALLED - status
    if status > SIGNALLED:
        with suppress(ValueError):  # a status of its own
            number = signal.Signals(status - SIGNALLED)
            return f"was killed by {number.name} (status {status}{_WHO.get(number, '')})"
    return f"ended with status {status}"
