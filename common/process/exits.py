"""How a process ended, in words."""

import signal
from contextlib import suppress

SIGNALLED = 128
"""Exit statuses above this are those of processes that a signal ended."""
_WHO = {signal.SIGKILL: "; the kernel does so when memory runs out"}


def shell_status(code: int) -> int:
    """Returns an exit status of `subprocess` as a shell has it: 128 + n when signal n ended it."""
    return code if code >= 0 else SIGNALLED - code


def how_ended(status: int) -> str:
    """Returns the words that follow the name of a process with this exit status: `ended with status
    3`, `was killed by SIGKILL (status 137 …)`. A negative status is a signal, as in `subprocess`.
    """
    status = shell_status(status)
    if status > SIGNALLED:
        with suppress(ValueError):  # a status of its own
            number = signal.Signals(status - SIGNALLED)
            return f"was killed by {number.name} (status {status}{_WHO.get(number, '')})"
    return f"ended with status {status}"
