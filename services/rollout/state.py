"""The state of a node's engine and the decisions that follow. Pure: no processes, no HTTP, no
clock.
"""

from dataclasses import dataclass
from typing import Literal

from common.wire.schemas import WorkerState
from services.rollout.weights.store import WeightId

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

    def engine_up(self, serves: WeightId | None) -> None:
        self.engine, self.serves, self.failed_loads = "up", serves, 0
        if self.wanted in (None, serves):
            self._caught_up()

    def engine_down(self, reason: str) -> None:
        """Records that the engine has ended; it is being restarted."""
        self.engine, self.serves, self.admitted, self.updating, self.detail = (
            "failed",
            None,
            False,
            False,
            reason,
        )
        self.asleep = False

    def update_done(self, serves: WeightId) -> None:
        self.updating, self.serves = False, serves
        if serves == self.wanted:
            self._caught_up()

    def update_failed(self, reason: str, engine_failed: bool) -> None:
        """Records a failed download or load."""
        self.updating, self.admitted, self.detail = False, False, reason
        self.failures += 1
        self.failed_loads += engine_failed

    def _caught_up(self) -> None:
        self.admitted, self.failures, self.failed_loads, self.detail = True, 0, 0, ""

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
        return self.engine == "up" and self.admitted and not self.draining

    @property
    def must_restart(self) -> bool:
        """Whether so many loads failed that the engine must be restarted."""
        return self.failed_loads >= UPDATES_BEFORE_RESTART

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return min(_MAX_BACKOFF_S, 0.5 * 2 ** min(10, self.failures - 1)) if self.failures else 0.0

    def problem(self) -> str | None:
        """Returns why the node does not serve the newest weights, or None."""
        if self.in_traffic:
            return None
        target = "the base model" if self.wanted is None else f"weights {self.wanted.version}"
        return f"the engine is {self.worker_state}, wanted: {target}" + (
            f": {self.detail}" if self.detail else ""
        )
