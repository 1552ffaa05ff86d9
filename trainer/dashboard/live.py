"""The dashboard of the run that this process trains, mounted in the trainer's own app."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from fastapi import FastAPI

from trainer.dashboard.app import PAGES, add_dashboard
from trainer.dashboard.runs import RunReader
from trainer.diagnosis.health import Health


class LiveDashboard:
    """Shows the run in `run_dir`, and the `health` of the other tasks."""

    open_paths = PAGES

    def __init__(self, run_dir: Path, health: Health | None = None) -> None:
        self._run_dir = run_dir
        self._health = health

    @property
    def lifespan(self) -> Callable[[], AbstractAsyncContextManager[None]] | None:
        """Holds the connections of the health checks; None without them."""
        return self._health.running if self._health else None

    def add_to(self, app: FastAPI) -> None:
        """Adds the page and its calls to an app whose open paths include `open_paths`."""
        run = RunReader(self._run_dir, live=True)
        add_dashboard(app, lambda: [run], self._health)
