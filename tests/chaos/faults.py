"""The schedule of faults for a job group, a pure function of a seed."""

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut", "preempt"]
"""`kill -9` of one process; SIGSTOP, SIGCONT after `hold_s`; its TCP connections shut down; `kill
-9` of a whole node."""

PROCESSES = (
    *("data-server", "reward-server", "grader", "replay-buffer", "router"),
    *("engine-0", "engine-1", "agent-0", "agent-1", "trainer-0", "trainer-1"),
)
EPISODE_PROCESSES = ("environment-0", "environment-1", "engine-0", "engine-1", "router")
"""The processes that an episode needs."""
NODES = (
    *("data-server-0", "reward-server-0", "replay-buffer-0"),
    *("rollout-server-0", "rollout-server-1", "ppo-trainer-0", "ppo-trainer-1"),
)
Choice = tuple[Kind, str]
_WITHOUT_CONNECTIONS = ("grader",)
EVERYTHING: tuple[Choice, ...] = (
    *(("kill", name) for name in PROCESSES),
    *(("stop", name) for name in PROCESSES),
    *(("cut", name) for name in PROCESSES if name not in _WITHOUT_CONNECTIONS),
    *(("preempt", name) for name in NODES),
)
EPISODES: tuple[Choice, ...] = (
    *((kind, name) for kind in ("kill", "stop", "cut") for name in EPISODE_PROCESSES),
    ("preempt", "environment-server-1"),
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


def schedule(
    seed: int,
    steps: int,
    count: int,
    hold_s: tuple[float, float],
    choices: tuple[Choice, ...] = EVERYTHING,
) -> list[Fault]:
    """Returns `count` faults spread over the first `steps` - 1 steps of a run, in order.

    The next fault is always the one that occurred least often so far, by kind and target. `hold_s`
    is the range of a stop's seconds. This is a pure function of its arguments.
    """
    rng = random.Random(f"chaos {seed}")
    done: list[Choice] = []
    for _ in range(count):
        fewest = min(_rank(done, choice) for choice in choices)
        done.append(rng.choice([choice for choice in choices if _rank(done, choice) == fewest]))
    faults = []
    for i, (kind, target) in enumerate(done):
        first, last = 1 + i * (steps - 2) / count, 1 + (i + 1) * (steps - 2) / count
        held = round(rng.uniform(*hold_s), 2) if kind == "stop" else 0.0
        faults.append(
            Fault(int(rng.uniform(first, last)), round(rng.uniform(0, 0.6), 2), kind, target, held)
        )
    return faults


def _rank(done: list[Choice], choice: Choice) -> tuple[int, int]:
    """Counts the earlier faults of exactly this choice, and those of its kind or target."""
    return done.count(choice), sum(
        (kind == choice[0]) + (target == choice[1]) for kind, target in done
    )
