"""The state of a node's engine and the decisions that follow. Pure: no processes, no HTTP, no
clock.
"""

from dataclasses import dataclass
from typing import Literal

from common.wire.schemas import WorkerState
from services.rollout.weights.trainer_client import WeightId

UPDATES_BEFORE_RESTART = 3
_MAX_BACKOFF_S = 30.0


@dataclass
class NodeState:
    """The engine, the weights it serves, and the weights it should serve.

    An engine that (re)started or failed an update gets no traffic until it serves the newest known
    weights. An updating engine keeps its traffic; the requests wait.
    """

    engine: Literal["starting", "up", "failed"] = "starting"
    serves: WeightId | None = None
    """None for the base model."""
    wanted: WeightId | None = None
    """The trainer's newest version; None before the first."""
    updating: bool = False
    admitted: bool = False
    failures: int = 0
    """Failed attempts in a row to reach `wanted`."""
    failed_loads: int = 0
    """Loads that failed in the engine since its start."""
    detail: str = ""
    draining: bool = False
    asleep: bool = False
    """Whether the trainer has the shared GPUs and the engine holds no memory there: it sleeps or
    waits to be started."""
    cut_off: bool = False
    """Whether the trainer goes on without this engine, or answers no more: it may have published
    weights that did not arrive here."""

    def engine_up(self, serves: WeightId | None) -> None:
        """Records that the engine is healthy and which weights it serves."""
        self.engine = "up"
        self.serves = serves
        self.failed_loads = 0
        if self.wanted in (None, serves):
            self._caught_up()

    def engine_down(self, reason: str) -> None:
        """Records that the engine has ended; it is being restarted."""
        self.engine = "failed"
        self.serves = None
        self.admitted = False
        self.updating = False
        self.asleep = False
        self.detail = reason

    def update_done(self, serves: WeightId) -> None:
        """Records that the engine serves new weights."""
        self.updating = False
        self.serves = serves
        if serves == self.wanted:
            self._caught_up()

    def strayed(self, reason: str) -> None:
        """Records that the engine serves other weights than it has loaded; it loads them again."""
        self.serves = None
        self.admitted = False
        self.detail = reason

    def update_failed(self, reason: str, engine_failed: bool) -> None:
        """Records a failed download or load."""
        self.updating = False
        self.admitted = False
        self.detail = reason
        self.failures += 1
        if engine_failed:
            self.failed_loads += 1

    def _caught_up(self) -> None:
        self.admitted = True
        self.failures = 0
        self.failed_loads = 0
        self.detail = ""

    @property
    def worker_state(self) -> WorkerState:
        """The state as reported to the trainer."""
        if self.asleep:
            return "asleep"
        if self.engine != "up":
            return self.engine
        if self.updating:
            return "updating"
        if self.failures:
            return "stale"
        return "ready" if self.admitted else "updating"

    @property
    def in_traffic(self) -> bool:
        """Whether the router should list the engine."""
        return self.is_newest and not self.cut_off

    @property
    def is_newest(self) -> bool:
        """Whether the engine serves the newest weights that the node knows."""
        return self.engine == "up" and self.admitted and not self.draining

    @property
    def must_restart(self) -> bool:
        """Whether the engine must be restarted because too many loads failed."""
        return self.failed_loads >= UPDATES_BEFORE_RESTART

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next attempt."""
        if not self.failures:
            return 0.0
        doublings = min(10, self.failures - 1)
        return min(_MAX_BACKOFF_S, 0.5 * 2.0**doublings)

    def problem(self) -> str | None:
        """Returns why the node does not serve the newest weights, or None."""
        if self.in_traffic:
            return None
        if self.is_newest:
            return "the trainer does not answer, or goes on without this engine"
        target = "the base model" if self.wanted is None else f"weights {self.wanted.version}"
        problem = f"the engine is {self.worker_state}, wanted: {target}"
        return f"{problem}: {self.detail}" if self.detail else problem
