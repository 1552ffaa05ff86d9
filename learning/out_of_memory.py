"""Errors of a process that gets no more memory: torch, Python and the system each have words of
their own for it, and few of them say "memory".
"""

import errno
import re

import torch

_WORDS = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|can't start new thread", re.IGNORECASE
)


def exhausted_memory(error: BaseException) -> str:
    """Returns the memory that was too small if this error says so, `GPU memory` or `memory`; else
    nothing.

    A thread that cannot start lacks memory for its stack, or its process may have no more threads.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return "memory" if error.errno == errno.ENOMEM else ""
    if isinstance(error, RuntimeError) and _WORDS.search(str(error)):
        return "memory"
    return ""
