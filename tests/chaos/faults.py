"""The faults of a job group, and the names of what they hit."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut", "preempt"]
"""`kill -9` of one process; SIGSTOP, SIGCONT after `hold_s`; its TCP connections shut down; `kill
-9` of a whole node."""

PROCESSES = (
    *("data-server", "reward-server", "grader", "replay-buffer", "router"),
    *("engine-0", "engine-1", "agent-0", "agent-1", "trainer-0", "trainer-1"),
)
NODES = (
    *("data-server-0", "reward-server-0", "replay-buffer-0"),
    *("rollout-server-0", "rollout-server-1", "ppo-trainer-0", "ppo-trainer-1"),
)


@dataclass(frozen=True)
class Fault:
    """A fault, its target and its moment."""

    step: int
    """The fault occurs after the run has trained this many steps,"""
    after_s: float
    """and this many seconds have passed since."""
    kind: Kind
    target: str
    hold_s: float = 0.0
    """Seconds of a stop."""
