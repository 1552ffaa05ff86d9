"""The dashboard of the run that this process trains, mounted in the trainer's own app."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from fastapi import FastAPI

from common.clients.replay import ReplayClient
from common.process.loop_thread import LoopThread
from common.process.topology import Topology
from common.settings.config import Config
from trainer.dashboard.app import PAGES, add_dashboard
from trainer.dashboard.replay import Replay
from trainer.dashboard.runs import RunReader
from trainer.diagnosis.health import Health


class LiveDashboard:
    """Shows the run in `run_dir`, the `health` of the other tasks, and the groups in `replay`."""

    open_paths = PAGES

    def __init__(
        self, run_dir: Path, health: Health | None = None, replay: Replay | None = None
    ) -> None:
        self._run_dir = run_dir
        self._health = health
        self._replay = replay

    @property
    def lifespan(self) -> Callable[[], AbstractAsyncContextManager[None]] | None:
        """Holds the connections of the health checks; None without them."""
        return self._health.running if self._health else None

    def add_to(self, app: FastAPI) -> None:
        """Adds the page and its calls to an app whose open paths include `open_paths`."""
        run = RunReader(self._run_dir, live=True)
        add_dashboard(app, lambda: [run], self._health, self._replay)


def dashboard_of_job_group(
    run_dir: Path,
    config: Config,
    topology: Topology,
    *,
    nodes: Callable[[], int],
    version: Callable[[], int | None],
    replay: ReplayClient,
    loop: LoopThread,
) -> LiveDashboard:
    """Returns the dashboard of a run in a job group.

    Args:
        run_dir: directory of the run.
        config: its settings.
        topology: finds the other tasks.
        nodes: returns the number of known rollout nodes.
        version: returns the newest weight version, or None.
        replay: the run's replay-buffer.
        loop: runs the client's calls.
    """
    health = Health(config, topology, nodes, version)
    return LiveDashboard(run_dir, health, Replay(replay, loop))
