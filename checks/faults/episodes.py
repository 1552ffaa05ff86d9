"""Faults of environments and their tools."""

import time
from typing import Any

from checks.faults.fault import fault
from checks.faults.lab import Chat, Lab
from tests.support.processes.ports import free_port

_STEPS = 12
_DEADLINE_S = 3.0
_SETTINGS = {"environment.context": 250, "environment.turns": 2}


class _Asks:
    """Asks once more, and pays for digits."""

    lab: Lab

    def reset(self, **columns: Any) -> None:
        """Begins an episode."""
        self.asked = 0

    def step(self, messages: Chat) -> str | None:
        """Asks once more."""
        self.asked += 1
        self.text = messages[-1]["content"]
        return "Are you sure?" if self.asked < 2 else None

    def get_reward(self) -> float:
        """Counts digits."""
        return sum(map(str.isdigit, self.text)) / 10


def _play(lab: Lab, environment: type[_Asks], **settings: Any) -> None:
    environment.lab = lab
    chosen = _SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    lab.script(environment=environment, max_steps=_STEPS, settings=chosen)


@fault(
    "the environment raises an error in every episode",
    r"the quota of the search engine is used up",
    r"error|lost|episode",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1816",
)
def environment_fails(lab: Lab) -> None:
    class Fails(_Asks):
        def step(self, messages: Chat) -> str | None:
            lab.strike()
            raise RuntimeError("the quota of the search engine is used up")

    _play(lab, Fails, limits__max_failed_groups=8)


@fault(
    "the environment hangs, so that episodes run out of time",
    r"timeout|deadline|out of time|longer",
    r"episode|environment",
    reported="https://github.com/PrimeIntellect-ai/prime/issues/381",
    timeout="environment.deadline_s",
    timeout_s=_DEADLINE_S,
)
def environment_hangs(lab: Lab) -> None:
    class Hangs(_Asks):
        def step(self, messages: Chat) -> str | None:
            lab.strike()
            time.sleep(3600)
            return None

    _play(lab, Hangs, environment__deadline_s=_DEADLINE_S, limits__max_failed_groups=8)


@fault(
    "a fifth of the episodes is lost",
    r"episodes",
    r"lost",
    r"\d+ ?%|error",
    in_steps=True,
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1622",
)
def environment_loses_some(lab: Lab) -> None:
    class Unlucky(_Asks):
        def step(self, messages: Chat) -> str | None:
            if lab.rng.random() < 0.2:
                lab.strike()
                raise RuntimeError("its machine is gone")
            return super().step(messages)

    _play(lab, Unlucky, environment__min_episodes=2)


@fault("the reward of the environment is NaN", r"nan|not finite|number", r"reward|get_reward")
def environment_nan_reward(lab: Lab) -> None:
    class Nan(_Asks):
        def get_reward(self) -> float:
            lab.strike()
            return float("nan")

    _play(lab, Nan, limits__max_failed_groups=8)


@fault(
    "the server of the environment cannot be reached",
    r"agent|environment",
    r"reach|refused|connect",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1816",
)
def environment_unreachable(lab: Lab) -> None:
    lab.strike()
    config = lab.settings(
        environment__name=f"agent:http://127.0.0.1:{free_port()}/run",
        environment__context=250,
        environment__deadline_s=5,
        limits__max_failed_groups=8,
        limits__stuck_after_s=30,
    )
    lab.train(config)
