"""Tells how far a command is that re-executes steps."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.process import watchdog

_SAY_EVERY_S = 10.0


@contextmanager
def waits_told() -> Iterator[None]:
    """Inside the block, prints every `_SAY_EVERY_S` seconds to standard error what rank 0 is doing:
    on a busy machine, importing the libraries alone takes minutes.
    """
    # All ranks are at the same place, and one line is enough.
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    ended = threading.Event()
    begun = time.monotonic()

    def tell() -> None:
        while not ended.wait(_SAY_EVERY_S):
            at = watchdog.place()
            what = at[0] if at else "ending"
            print(f"… after {time.monotonic() - begun:.0f} s: {what}", file=sys.stderr)

    with watchdog.stalls():
        watchdog.at("loading the libraries")
        threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
