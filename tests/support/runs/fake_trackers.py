"""Custom trackers for `trackers.names`: one that records everything, and others that fail in every
way."""

import atexit
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from trainer.trackers.base import Cell, RunInfo

END = threading.Event()
"""Ends what hangs. A thread of a tracker that outlived its test would end the process of the tests
as soon as one of them calls a program (`exit_despite_hung_tracker`)."""


class Keeps:
    """Writes every call to `trackers/kept.jsonl` in the run directory."""

    def __init__(self, run: RunInfo) -> None:
        self.run, self.where = run, "kept.jsonl"
        self._keep(
            "start", asdict(run) | {"directory": str(run.directory), "parameters": run.parameters}
        )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._keep("metrics", {"step": step, "values": values})

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        self._keep("table", {"step": step, "name": name, "columns": columns, "rows": rows})

    def close(self, finished: bool) -> None:
        self._keep("close", {"finished": finished})

    def _keep(self, call: str, content: dict[str, Any]) -> None:
        with (self.run.directory / "kept.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([call, content]) + "\n")


class Hangs(Keeps):
    """Starts, then hangs in every call."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        END.wait()


class NeverStarts(Keeps):
    """Hangs in its constructor."""

    def __init__(self, run: RunInfo) -> None:
        END.wait()


class Raises(Keeps):
    """Refuses metrics but accepts tables."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        raise ConnectionError(f"no way to {os.environ.get('WANDB_API_KEY')}")


class Exits(Keeps):
    """Ends the interpreter at the first call, as a library's `sys.exit` would."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        sys.exit(9)


class HangsAtExit(Hangs):
    """Has an exit hook that waits for ever."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        atexit.register(threading.Event().wait)


class Refuses(Keeps):
    """Cannot begin."""

    def __init__(self, run: RunInfo) -> None:
        raise ValueError("there is no such project")


class Waits(Keeps):
    """Accepts no record until the file `go` exists."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        while not (self.run.directory / "go").exists():
            time.sleep(0.01)
        super().metrics(step, values)
