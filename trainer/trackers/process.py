"""`python -m trainer.trackers.process NAME`: a tracker, fed through standard input.

A line in is `[call, arguments]`; a line out is `{"done": …}` or `{"error": …}`. What libraries print goes to standard error.
Ends when its input does, and some time after its parent even if the tracker hangs.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from common.imports import import_callable
from trainer.trackers.base import LIBRARIES, RunInfo, Tracker

_LINGER_S = 60.0


def load(name: str) -> Callable[[RunInfo], Tracker]:
    """The class of a tracker: one of this package, or `package.module:Class`."""
    return import_callable(f"trainer.trackers.to_{name}:Made" if name in LIBRARIES else name, "trackers.names")


def main() -> None:
    """Serves until the input ends."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)  # they go to the whole group; the trainer says when it is over
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tracker, closed = None, False
    for line in sys.stdin:
        call, arguments = json.loads(line)
        try:
            if call == "start":
                arguments["directory"] = Path(arguments["directory"])
                tracker = load(sys.argv[1])(RunInfo(**arguments))
                _answer(answers, done=tracker.where)
            else:
                getattr(tracker, call)(**arguments)
                _answer(answers, done=True)
            closed = closed or call == "close"
        except Exception as error:  # whatever a library raises
            print(f"{call}: {error!r}", file=sys.stderr, flush=True)
            _answer(answers, error=f"{type(error).__name__}: {error}"[:500])
    if tracker is not None and not closed:
        tracker.close(False)


def _answer(answers: TextIO, **content: Any) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_LINGER_S)
    os._exit(1)


if __name__ == "__main__":
    main()
