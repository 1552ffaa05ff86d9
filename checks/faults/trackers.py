"""Experiment trackers that misbehave."""

import time
from typing import Any

from trainer.trackers.base import Cell, RunInfo


class Refusing:
    """Refuses every record."""

    where = "nowhere"

    def __init__(self, run: RunInfo) -> None:
        """Accepts every run."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Fails."""
        raise RuntimeError("the quota of this account is used up")

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        """Ignores samples."""

    def close(self, finished: bool) -> None:
        """Does nothing."""


class Sleeping(Refusing):
    """Accepts a record and never returns."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Hangs."""
        time.sleep(3600)

    def close(self, finished: Any) -> None:
        """Hangs."""
        time.sleep(3600)
