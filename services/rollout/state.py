"""What is known of this node's engine and what follows from it. Pure: no processes, no HTTP, no clock."""

from dataclasses import dataclass
from typing import Literal

from common.schemas import WorkerState
from services.rollout.weights.store import WeightId

UPDATES_BEFORE_RESTART = 3
_MAX_BACKOFF_S = 30.0


@dataclass
class NodeState:
    """The engine, the weights it serves, and the weights it should serve.

    The rule of traffic: an engine that has (re)started gets none until it serves the newest known weights, one that
    failed an update gets none until it has caught up; one that is updating keeps its place (its requests wait).
    """

    engine: Literal["starting", "up", "failed"] = "starting"
    serves: WeightId | None = None
    """None is the base model."""
    wanted: WeightId | None = None
    """The newest version of the trainer; None before the first."""
    updating: bool = False
    admitted: bool = False
    failures: int = 0
    """Failed attempts in a row to get to `wanted`, of any kind."""
    failed_loads: int = 0
    """Those at which the engine failed, since it was started."""
    detail: str = ""
    draining: bool = False

    def engine_up(self, serves: WeightId | None) -> None:
        """The engine answers and serves these weights."""
        self.engine, self.serves, self.failed_loads = "up", serves, 0
        if self.wanted in (None, serves):
            self._caught_up()

    def engine_down(self, reason: str) -> None:
        """The engine ended or was killed; it is being started again."""
        self.engine, self.serves, self.admitted, self.updating, self.detail = "failed", None, False, False, reason

    def found(self, wanted: WeightId) -> None:
        """The trainer's newest version is `wanted`."""
        self.wanted = wanted

    def update_began(self) -> None:
        self.updating = True

    def update_done(self, serves: WeightId) -> None:
        """The engine confirmed that it serves `serves`."""
        self.updating, self.serves = False, serves
        if serves == self.wanted:
            self._caught_up()

    def update_stopped(self) -> None:
        """Given up without a verdict: the trainer went away, or the engine did and is being started again."""
        self.updating = False

    def update_failed(self, reason: str, engine_failed: bool) -> None:
        """This version could not be downloaded as promised, or the engine did not take it."""
        self.updating, self.admitted, self.detail = False, False, reason
        self.failures += 1
        self.failed_loads += engine_failed

    def _caught_up(self) -> None:
        self.admitted, self.failures, self.failed_loads, self.detail = True, 0, 0, ""

    @property
    def worker_state(self) -> WorkerState:
        """As the trainer is told."""
        if self.engine != "up":
            return self.engine
        if self.updating:
            return "updating"
        if self.failures:
            return "stale"
        return "ready" if self.admitted else "updating"

    @property
    def in_traffic(self) -> bool:
        """Whether the router should know this engine."""
        return self.engine == "up" and self.admitted and not self.draining

    @property
    def must_restart(self) -> bool:
        """Whether the engine refused so often that it has to be started again."""
        return self.failed_loads >= UPDATES_BEFORE_RESTART

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next attempt to get to `wanted`."""
        return min(_MAX_BACKOFF_S, 0.5 * 2 ** min(10, self.failures - 1)) if self.failures else 0.0

    def problem(self) -> str | None:
        """Why this node does not serve as it should, or None."""
        if self.in_traffic:
            return None
        target = "the base model" if self.wanted is None else f"weights {self.wanted.version}"
        return f"the engine is {self.worker_state}, wanted: {target}" + (f": {self.detail}" if self.detail else "")
